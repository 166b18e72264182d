//! Where the server programs are.
//!
//! The rule: the caller's word first, then the newest server that a package manager installed, then whatever PATH offers. Debian
//! keeps `initdb` and `postgres` out of PATH, so looking only there finds nothing on the most common machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::EmbeddedError;

/// The environment variable that names the directory of `initdb` and `postgres`.
const OVERRIDE: &str = "WORKPUMP_PG_BIN";
/// Directories whose entries are named after a major version and hold a `bin`.
const VERSIONED: [&str; 4] =
    ["/usr/lib/postgresql", "/opt/homebrew/opt", "/usr/local/opt", "/usr/local/pgsql"];

/// The directory of `initdb` and `postgres`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerPrograms {
    bin: PathBuf,
}

impl ServerPrograms {
    /// Looks in `WORKPUMP_PG_BIN`, the newest of `/usr/lib/postgresql/*/bin`, Homebrew's directories, and PATH, in this order.
    pub fn find() -> Result<Self, EmbeddedError> {
        if let Some(bin) = env::var_os(OVERRIDE).filter(|value| !value.is_empty()).map(PathBuf::from) {
            let looked = format!("{OVERRIDE}={} has no initdb", bin.display());
            return usable(bin).ok_or(EmbeddedError::NoServerPrograms { looked, install: install_line() });
        }
        let mut roots = VERSIONED.iter().map(Path::new);
        roots.find_map(newest_below).or_else(in_path).ok_or_else(|| EmbeddedError::NoServerPrograms {
            looked: format!("looked below {} and in PATH", VERSIONED.join(", ")),
            install: install_line(),
        })
    }

    /// The directory itself.
    pub fn bin_dir(&self) -> &Path {
        &self.bin
    }

    pub(super) fn initdb(&self) -> PathBuf {
        self.bin.join("initdb")
    }

    pub(super) fn postgres(&self) -> PathBuf {
        self.bin.join("postgres")
    }
}

fn usable(bin: PathBuf) -> Option<ServerPrograms> {
    (bin.join("initdb").is_file() && bin.join("postgres").is_file()).then_some(ServerPrograms { bin })
}

fn newest_below(root: &Path) -> Option<ServerPrograms> {
    let entries = fs::read_dir(root).ok()?.flatten();
    let mut found: Vec<(u32, ServerPrograms)> = entries
        .filter_map(|entry| {
            let programs = usable(entry.path().join("bin"))?;
            Some((major_version(&entry.file_name().to_string_lossy()), programs))
        })
        .collect();
    found.sort_by_key(|(major, _)| *major);
    found.pop().map(|(_, programs)| programs)
}

/// `17` and `postgresql@17` are 17; anything else sorts first.
fn major_version(name: &str) -> u32 {
    name.trim_start_matches("postgresql@").parse().unwrap_or(0)
}

fn in_path() -> Option<ServerPrograms> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).find_map(|dir| {
        // A link such as /usr/local/bin/initdb points into the directory that also has the libraries.
        let initdb = fs::canonicalize(dir.join("initdb")).ok()?;
        usable(initdb.parent()?.to_owned())
    })
}

fn install_line() -> &'static str {
    let has = |program: &str| {
        env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
    };
    if has("apt-get") {
        "apt-get install -y postgresql"
    } else if has("dnf") {
        "dnf install -y postgresql-server"
    } else if has("brew") {
        "brew install postgresql"
    } else {
        "apt-get install -y postgresql (Debian, Ubuntu), dnf install -y postgresql-server (Fedora) or brew install postgresql (macOS)"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_several_installed_servers_is_taken() {
        let root = tempfile::tempdir().unwrap();
        for (version, programs) in [("9.6", true), ("15", true), ("postgresql@17", true), ("18", false)] {
            let bin = root.path().join(version).join("bin");
            fs::create_dir_all(&bin).unwrap();
            for program in ["initdb", "postgres"].iter().filter(|_| programs) {
                fs::write(bin.join(program), "").unwrap();
            }
        }
        assert_eq!(newest_below(root.path()).unwrap().bin_dir(), root.path().join("postgresql@17/bin"));
    }

    #[test]
    fn a_directory_without_servers_yields_nothing() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("17/bin")).unwrap();
        assert_eq!(newest_below(root.path()), None);
        assert_eq!(newest_below(&root.path().join("absent")), None);
    }
}
