//! What the doctor says: one finding for each check and thing, with its weight and the next step.
//!
//! The rule: a finding that is not "ok" names what was seen, why it matters and what to do. The failure this prevents: a red line that
//! nobody can act on.

use serde::Serialize;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing has to be done.
    Note,
    /// It works, but worse than it should, or not for long.
    Warning,
    /// Something does not work.
    Error,
}

impl Severity {
    /// As it is written in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What a check is about; the order is that of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Group {
    /// The two addresses: who answers, and whether notifications come through.
    Connections,
    /// What the role may do.
    Rights,
    /// Tables, functions, indexes: as this library needs them.
    Schema,
    /// Settings, clock, room for sessions.
    Server,
    /// What goes on: the horizon, the notification queue, dead rows.
    Activity,
    /// Members and the work they hold.
    Instances,
}

impl Group {
    /// As it is written in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Rights => "rights",
            Self::Schema => "schema",
            Self::Server => "server",
            Self::Activity => "activity",
            Self::Instances => "instances",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// The check's name, for programs: stable, such as `schema.index`.
    pub check: &'static str,
    /// What it is about.
    pub group: Group,
    /// How much it matters.
    pub severity: Severity,
    /// The object in question, where there is one: a table, an index, an instance, a setting.
    pub subject: Option<String>,
    /// What was seen.
    pub seen: String,
    /// Why it matters; none when all is well.
    pub why: Option<String>,
    /// What to do about it; none when there is nothing to do.
    pub next_step: Option<String>,
}

/// A check, from which findings are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Check(pub(crate) Group, pub(crate) &'static str);

impl Check {
    /// All is well.
    pub(crate) fn ok(self, seen: impl Into<String>) -> Finding {
        Finding {
            check: self.1,
            group: self.0,
            severity: Severity::Ok,
            subject: None,
            seen: seen.into(),
            why: None,
            next_step: None,
        }
    }

    /// Worth knowing.
    pub(crate) fn note(self, seen: impl Into<String>, why: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, why: Some(why.into()), ..self.ok(seen) }
    }

    /// Not as it should be.
    pub(crate) fn warning(self, seen: impl Into<String>, why: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, ..self.note(seen, why) }
    }

    /// Broken.
    pub(crate) fn error(self, seen: impl Into<String>, why: impl Into<String>) -> Finding {
        Finding { severity: Severity::Error, ..self.note(seen, why) }
    }

    /// The question was not answered. Not knowing is no health.
    pub(crate) fn not_made(self, reason: impl std::fmt::Display) -> Finding {
        self.warning(format!("could not be checked: {reason}"), "what was not looked at may be broken")
            .next("clear the cause and run the doctor again")
    }
}

impl Finding {
    /// Names the object.
    pub(crate) fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }

    /// Makes a warning of it.
    pub(crate) fn is_warning(&mut self) {
        self.severity = Severity::Warning;
    }

    /// Makes an error of it.
    pub(crate) fn is_error(&mut self) {
        self.severity = Severity::Error;
    }

    /// Says what to do.
    pub(crate) fn next(self, step: impl Into<String>) -> Self {
        Self { next_step: Some(step.into()), ..self }
    }
}

/// Names in a sentence: the first few, and how many more.
pub(crate) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn severities_are_ordered_by_how_much_they_matter() {
        assert!(Severity::Ok < Severity::Note && Severity::Note < Severity::Warning);
        assert!(Severity::Warning < Severity::Error);
    }

    #[test]
    fn long_lists_are_cut_and_say_so() {
        let names: Vec<String> = (1..=10).map(|n| n.to_string()).collect();
        assert_eq!(listed(&names), "1, 2, 3, 4, 5, 6, 7, 8 and 2 more");
        assert_eq!(listed(&names[..2]), "1, 2");
    }
}
