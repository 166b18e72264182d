//! Options from a file and from the environment.
//!
//! The rule: every option has one name everywhere (`claim.lease_seconds` in code, `[claim] lease_seconds` in a file,
//! `WORKPUMP_CLAIM_LEASE_SECONDS` in the environment), later sources win, and an unknown name is an error with a suggestion. The failure
//! this prevents: a misspelt option that silently leaves the default in force.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use workpump_actors::options::{Options, OptionsError};

/// The prefix of every environment variable.
const PREFIX: &str = "WORKPUMP_";
/// Variables with the prefix that are not options: the CLI's, the launcher's, and everything for tests.
const OTHERS: [&str; 5] =
    ["WORKPUMP_DATABASE_URL", "WORKPUMP_DIRECT_URL", "WORKPUMP_SCHEMA", "WORKPUMP_CONFIG", "WORKPUMP_PG_BIN"];
const TEST_PREFIX: &str = "WORKPUMP_TEST_";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration {path} is not valid TOML: {cause}")]
    NotToml {
        /// The file.
        path: PathBuf,
        /// What the parser said, with the line.
        cause: String,
    },
    /// There is no such option.
    #[error("unknown option {name}{}", suggestion.as_ref().map(|near| format!(": did you mean {near}?")).unwrap_or_default())]
    Unknown {
        /// The name as given.
        name: String,
        /// The nearest that exists.
        suggestion: Option<String>,
    },
    /// The value does not fit the option.
    #[error("option {name} = {value:?} cannot be used: {cause}")]
    Value {
        /// The option.
        name: String,
        /// The value as given.
        value: String,
        /// What was expected.
        cause: String,
    },
    /// The options contradict each other or exceed a bound.
    #[error(transparent)]
    Invalid(#[from] OptionsError),
}

/// Options from the process environment on top of the defaults.
pub fn from_env() -> Result<Options, ConfigError> {
    load(None, std::env::vars())
}

/// Options from a TOML file, with the process environment on top.
pub fn from_file(path: impl AsRef<Path>) -> Result<Options, ConfigError> {
    load(Some(path.as_ref()), std::env::vars())
}

/// Defaults, then the file, then the variables; checked as a whole.
pub(crate) fn load(
    file: Option<&Path>,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<Options, ConfigError> {
    let mut layers = Layers::defaults();
    if let Some(path) = file {
        layers.add_file(path)?;
    }
    for (variable, value) in variables {
        layers.add_variable(&variable, &value)?;
    }
    layers.options.validate()?;
    Ok(layers.options)
}

/// The options so far, as the tree they serialize to and as the value they mean.
struct Layers {
    tree: Value,
    options: Options,
    /// Every option, by its path.
    names: Vec<Vec<String>>,
}

impl Layers {
    fn defaults() -> Self {
        let options = Options::default();
        let tree = serde_json::to_value(&options).unwrap_or_default();
        let mut names = Vec::new();
        leaves(&tree, &mut Vec::new(), &mut |path, _| names.push(path.to_vec()));
        Self { tree, options, names }
    }

    fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        let parsed: toml::Table = toml::from_str(&text)
            .map_err(|error| ConfigError::NotToml { path: path.to_owned(), cause: error.to_string() })?;
        let overlay = serde_json::to_value(parsed)
            .map_err(|error| ConfigError::NotToml { path: path.to_owned(), cause: error.to_string() })?;
        let mut given = Vec::new();
        leaves(&overlay, &mut Vec::new(), &mut |path, value| given.push((path.to_vec(), value.clone())));
        for (path, value) in given {
            if !self.names.contains(&path) {
                return Err(self.unknown(&path.join("."), "."));
            }
            self.set(&path, &path.join("."), &value)?;
        }
        Ok(())
    }

    fn add_variable(&mut self, variable: &str, text: &str) -> Result<(), ConfigError> {
        let Some(rest) = variable.strip_prefix(PREFIX) else { return Ok(()) };
        if OTHERS.contains(&variable) || variable.starts_with(TEST_PREFIX) {
            return Ok(());
        }
        let wanted = rest.to_ascii_lowercase();
        let Some(path) = self.names.iter().find(|path| path.join("_") == wanted).cloned() else {
            return Err(self.unknown(variable, "_"));
        };
        self.set(&path, variable, &literal(text))
    }

    /// Sets one option. The whole is read again at once, so that a wrong value is reported under the name it was given by.
    fn set(&mut self, path: &[String], name: &str, value: &Value) -> Result<(), ConfigError> {
        let mut tree = self.tree.clone();
        let mut slot = &mut tree;
        for key in path {
            slot = &mut slot[key.as_str()];
        }
        *slot = value.clone();
        self.options = Options::deserialize(&tree).map_err(|error| ConfigError::Value {
            name: name.to_owned(),
            value: value.as_str().map_or_else(|| value.to_string(), str::to_owned),
            cause: error.to_string(),
        })?;
        self.tree = tree;
        Ok(())
    }

    fn unknown(&self, name: &str, separator: &str) -> ConfigError {
        let spelt = |path: &Vec<String>| {
            if separator == "_" {
                format!("{PREFIX}{}", path.join("_").to_ascii_uppercase())
            } else {
                path.join(separator)
            }
        };
        let near = self.names.iter().map(spelt).map(|known| (strsim::jaro_winkler(name, &known), known));
        let suggestion = near
            .filter(|(likeness, _)| *likeness > 0.8)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, known)| known);
        ConfigError::Unknown { name: name.to_owned(), suggestion }
    }
}

/// Visits every leaf of a tree of objects.
fn leaves(node: &Value, path: &mut Vec<String>, visit: &mut impl FnMut(&[String], &Value)) {
    match node {
        Value::Object(group) => {
            for (key, value) in group {
                path.push(key.clone());
                leaves(value, path, visit);
                path.pop();
            }
        }
        leaf => visit(path, leaf),
    }
}

/// The value of a variable: a number, true, false, none, or a text.
fn literal(text: &str) -> Value {
    match text.trim() {
        "none" | "None" | "NONE" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Result<Options, ConfigError> {
        load(None, variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn every_option_can_be_set_by_its_variable() {
        for path in Layers::defaults().names {
            let variable = format!("{PREFIX}{}", path.join("_").to_ascii_uppercase());
            let error = with(&[(&variable, "{\"impossible\":1}")]).expect_err("no option is an object");
            assert!(matches!(&error, ConfigError::Value { name, .. } if *name == variable), "{error}");
        }
    }

    #[test]
    fn variables_are_typed_and_none_switches_an_option_off() {
        let options = with(&[
            ("WORKPUMP_CLAIM_LEASE_SECONDS", "60"),
            ("WORKPUMP_CLAIM_NOTIFY_HEALTHY_POLLING_INTERVAL_MILLISECONDS", "none"),
            ("WORKPUMP_HEARTBEAT_LIVENESS_SOURCE_MODE", "HeartbeatTableOnly"),
            ("WORKPUMP_DISPATCH_ON_FAILURE_INBOX", "Skip"),
            ("WORKPUMP_TEST_ANYTHING", "1"),
            ("WORKPUMP_DATABASE_URL", "postgresql://x"),
            ("HOME", "/root"),
        ])
        .expect("valid");
        assert_eq!(options.claim.lease_seconds, 60);
        assert_eq!(options.claim.notify_healthy_polling_interval_milliseconds, None);
        assert_eq!(options.dispatch.on_failure.inbox, workpump_actors::options::OnFailure::Skip);
    }

    #[test]
    fn a_misspelt_variable_is_refused_with_the_right_spelling() {
        let error = with(&[("WORKPUMP_CLAIM_LEASE_SECOND", "60")]).expect_err("unknown");
        assert_eq!(
            error.to_string(),
            "unknown option WORKPUMP_CLAIM_LEASE_SECOND: did you mean WORKPUMP_CLAIM_LEASE_SECONDS?"
        );
    }

    #[test]
    fn a_wrong_value_is_named_with_its_option() {
        let error = with(&[("WORKPUMP_CLAIM_LEASE_SECONDS", "soon")]).expect_err("no number").to_string();
        assert!(
            error.starts_with("option WORKPUMP_CLAIM_LEASE_SECONDS = \"soon\" cannot be used"),
            "{error}"
        );
        let error = with(&[("WORKPUMP_CLAIM_LEASE_SECONDS", "20")]).expect_err("below the grace").to_string();
        assert!(error.contains("lease_renewal.lease_grace_seconds = 30 cannot work"), "{error}");
    }

    #[test]
    fn a_file_is_read_and_its_unknown_keys_are_refused() {
        let directory = std::env::temp_dir().join(format!("workpump-config-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("temp dir");
        let path = directory.join("pump.toml");
        std::fs::write(&path, "[claim]\nlease_seconds = 90\n[settle]\nkeep_completed = true\n")
            .expect("write");
        let options = load(Some(&path), std::iter::empty()).expect("valid");
        assert_eq!((options.claim.lease_seconds, options.settle.keep_completed), (90, true));
        std::fs::write(&path, "[claim]\nlease_secs = 90\n").expect("write");
        let error = load(Some(&path), std::iter::empty()).expect_err("unknown").to_string();
        assert_eq!(error, "unknown option claim.lease_secs: did you mean claim.lease_seconds?");
        std::fs::remove_dir_all(&directory).expect("clean up");
    }
}
