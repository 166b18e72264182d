//! The schema's name, checked once and quoted for ever. The failure this prevents: a name that is cut off, or that ends a quote.

/// A schema name that is safe to put into SQL text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    name: String,
    quoted: String,
}

/// A schema name that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("schema name {name:?} cannot be used: {reason}")]
pub struct SchemaNameError {
    /// The name.
    pub name: String,
    /// The rule it breaks.
    pub reason: &'static str,
}

impl Schema {
    /// PostgreSQL cuts identifiers off after this many bytes.
    const MAX_BYTES: usize = 63;

    /// Checks a name. Any name PostgreSQL can store is allowed, except those that would end the quotes of a migration.
    pub fn new(name: &str) -> Result<Self, SchemaNameError> {
        let refuse = |reason| Err(SchemaNameError { name: name.to_owned(), reason });
        if name.is_empty() {
            return refuse("it is empty");
        }
        if name.len() > Self::MAX_BYTES {
            return refuse("it is longer than 63 bytes, where PostgreSQL cuts names off");
        }
        if name.contains('\0') {
            return refuse("it contains a NUL character");
        }
        if ["$wh$", "$make$", "$template$"].iter().any(|tag| name.contains(tag)) {
            return refuse("it contains a tag that would end the quotes of a function body");
        }
        if name.starts_with("pg_") {
            return refuse("names that start with pg_ belong to the server");
        }
        Ok(Self { name: name.to_owned(), quoted: format!("\"{}\"", name.replace('"', "\"\"")) })
    }

    /// The name as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name as a quoted SQL identifier.
    pub fn quoted(&self) -> &str {
        &self.quoted
    }

    /// The name as a quoted SQL literal.
    pub fn literal(&self) -> String {
        format!("'{}'", self.name.replace('\'', "''"))
    }
}

#[cfg(test)]
mod tests {
    use super::Schema;

    #[test]
    fn odd_names_are_quoted_and_impossible_ones_refused() {
        let odd = Schema::new("Größe \"x\" 'y'").expect("allowed");
        assert_eq!(odd.quoted(), "\"Größe \"\"x\"\" 'y'\"");
        assert_eq!(odd.literal(), "'Größe \"x\" ''y'''");
        for bad in ["", "a\0b", "a$wh$b", "pg_temp", &"x".repeat(64)] {
            assert!(Schema::new(bad).is_err(), "{bad:?}");
        }
    }
}
