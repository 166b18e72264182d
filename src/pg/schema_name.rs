//! The name of the schema the pump lives in.
//!
//! The rule: a name is checked once, and then only its quoted forms are used. An unchecked name in SQL text is an injection; a name longer
//! than PostgreSQL keeps is cut off silently, and two pumps then share tables.

use std::fmt;

/// The longest identifier PostgreSQL keeps, in bytes.
const MAX_BYTES: usize = 63;
/// How every dollar quote in the migrations begins. A schema name with it would end a function's body.
const DOLLAR_QUOTE: &str = "$wh";

/// Why a schema name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("schema name {name:?} {why}: choose another name")]
pub struct BadSchemaName {
    /// The name as given.
    pub name: String,
    /// What is wrong with it.
    pub why: &'static str,
}

/// A checked schema name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaName(String);

impl SchemaName {
    /// Checks `name`. Spaces, quotes and upper case are fine: it is quoted everywhere.
    pub(crate) fn new(name: &str) -> Result<Self, BadSchemaName> {
        let why = if name.is_empty() {
            "is empty"
        } else if name.len() > MAX_BYTES {
            "is longer than 63 bytes"
        } else if name.contains('\0') {
            "contains a NUL"
        } else if name.contains(DOLLAR_QUOTE) {
            "contains \"$wh\""
        } else {
            return Ok(Self(name.to_owned()));
        };
        Err(BadSchemaName { name: name.to_owned(), why })
    }

    /// As it was given.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// As an identifier in SQL text.
    pub(crate) fn identifier(&self) -> String {
        format!("\"{}\"", self.0.replace('"', "\"\""))
    }

    /// As a string literal in SQL text, read alike whatever `standard_conforming_strings` says.
    pub(crate) fn literal(&self) -> String {
        let quoted = self.0.replace('\'', "''");
        if quoted.contains('\\') {
            format!("E'{}'", quoted.replace('\\', "\\\\"))
        } else {
            format!("'{quoted}'")
        }
    }
}

impl fmt::Display for SchemaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_are_quoted_as_identifier_and_as_literal() {
        let name = SchemaName::new("My \"o'dd\\ schema").unwrap();
        assert_eq!(name.identifier(), "\"My \"\"o'dd\\ schema\"");
        assert_eq!(name.literal(), "E'My \"o''dd\\\\ schema'");
        assert_eq!(SchemaName::new("plain").unwrap().literal(), "'plain'");
    }

    #[test]
    fn names_that_postgres_would_cut_off_or_that_end_a_body_are_refused() {
        assert!(SchemaName::new(&"x".repeat(63)).is_ok());
        for bad in ["", &"x".repeat(64), "a\0b", "a$wh$b", "$wh_template$"] {
            assert!(SchemaName::new(bad).is_err(), "{bad:?}");
        }
    }
}
