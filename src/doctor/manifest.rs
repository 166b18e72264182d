//! What the migrations make, as a list, and a schema read in the same words.
//!
//! The rule: the list (`manifest.txt`) is written from a migrated schema by a test and compared by the same test, never by hand; after a
//! change of a migration run `WORKPUMP_TEST_UPDATE_MANIFEST=1 cargo test --all-features --lib manifest`. The failure this prevents: a
//! doctor that calls a healthy schema ill, or an ill one healthy.
//!
//! A line is a kind, a name and a definition as the server words it, with the schema's name left open. Bodies of functions are hashed: they
//! stand in `migrations/`. Nothing is created on the server that is examined.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::ask::{NoAnswer, Patient, value};
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::doctor as sql;

const MANIFEST: &str = include_str!("manifest.txt");
/// Stands for the schema's name as an identifier.
const IDENTIFIER: &str = "@schema@";
/// Stands for the schema's name as a string literal.
const LITERAL: &str = "@schema_text@";
/// Stands for the part of a setting's name that is computed from the schema's.
const MARK: &str = "@mark@";

/// One object of a schema.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Object {
    /// `relation`, `column`, `index`, `constraint`, `trigger` or `function`.
    pub(crate) kind: String,
    /// Its name; `table.name` for what belongs to a table, with types of arguments for a function.
    pub(crate) name: String,
    /// Its definition.
    pub(crate) text: String,
    /// Whether it is in force.
    pub(crate) usable: bool,
}

impl Object {
    /// The table it belongs to, or the relation it is.
    pub(crate) fn relation(&self) -> Option<&str> {
        match self.kind.as_str() {
            "function" => None,
            "relation" => Some(&self.name),
            _ => self.name.split('.').next(),
        }
    }

    /// A function's name without its arguments.
    pub(crate) fn function(&self) -> Option<&str> {
        (self.kind == "function").then(|| self.name.split('(').next()).flatten()
    }
}

/// How a server writes a schema's name.
#[derive(Debug, Clone)]
pub(crate) struct Spelling {
    /// As an identifier, quoted where it has to be.
    identifier: String,
    /// As an identifier, always quoted.
    quoted: String,
    /// As a literal.
    literal: String,
    /// What settings are marked with.
    mark: String,
}

impl Spelling {
    /// Asks the server.
    pub(super) async fn ask(patient: &Patient, schema: &SchemaName) -> Result<Self, NoAnswer> {
        let row = patient.row(sql::SPELLING, &[(&schema.as_str(), Type::TEXT)]).await?;
        Self::read(&row, schema)
    }

    /// From the answer to the question for it.
    pub(crate) fn read(row: &Row, schema: &SchemaName) -> Result<Self, NoAnswer> {
        let (identifier, mark) = (value(row, 0)?, value(row, 1)?);
        Ok(Self { identifier, quoted: schema.identifier(), literal: literal(schema), mark })
    }

    /// The schema's name as it stands in definitions.
    pub(crate) fn identifier(&self) -> &str {
        &self.identifier
    }

    fn filled(&self, text: &str) -> String {
        // In one pass: a schema may be called like a placeholder.
        let parts: Vec<_> = text.split(IDENTIFIER).map(|part| part.replace(LITERAL, &self.literal)).collect();
        parts.join(&self.identifier)
    }

    /// The opposite, for the schema that the list is written from: its name occurs nowhere else.
    #[cfg(test)]
    pub(crate) fn opened(&self, text: &str) -> String {
        text.replace(&self.literal, LITERAL).replace(&self.identifier, IDENTIFIER)
    }

    /// A body with the schema's name left open. Only where the name of one of our objects follows: a schema may be called like an alias.
    fn neutral(&self, body: &str, names: &Names) -> String {
        let mut neutral = String::with_capacity(body.len());
        let mut rest = body;
        let in_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '"' | '.');
        while !rest.is_empty() {
            let begins = !neutral.chars().next_back().is_some_and(in_name);
            let after = [&self.quoted, &self.identifier]
                .into_iter()
                .filter(|_| begins)
                .find_map(|name| rest.strip_prefix(name.as_str())?.strip_prefix('.'))
                .filter(|after| names.has(after.split(|c| !in_name(c)).next().unwrap_or_default()));
            if let Some(after) = after {
                neutral.push_str(IDENTIFIER);
                neutral.push('.');
                rest = after;
            } else {
                let next = rest.chars().next().map_or(rest.len(), char::len_utf8);
                neutral.push_str(&rest[..next]);
                rest = &rest[next..];
            }
        }
        neutral.replace(&self.mark, MARK)
    }
}

/// The names of our relations and functions.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    pub(crate) relations: Vec<String>,
    pub(crate) functions: Vec<String>,
}

impl Names {
    fn has(&self, name: &str) -> bool {
        self.relations.iter().chain(&self.functions).any(|own| own == name)
    }

    /// Those of the list.
    pub(crate) fn expected() -> Self {
        let objects = parse(MANIFEST);
        let of = |name: fn(&Object) -> Option<&str>| -> Vec<String> {
            objects.iter().filter_map(name).map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
        };
        Self { relations: of(Object::relation), functions: of(Object::function) }
    }
}

/// The tables and views among them that hold rows, which rights are about.
pub(crate) fn relations_with_rows() -> (Vec<String>, Vec<String>) {
    let objects = parse(MANIFEST);
    let of = |what: fn(&str) -> bool| {
        let found = objects.iter().filter(|object| object.kind == "relation" && what(&object.text));
        found.map(|object| object.name.clone()).collect()
    };
    (of(|text| text.starts_with("table")), of(|text| text.starts_with("view")))
}

/// What the migrations make in a schema of this name.
pub(crate) fn expected(spelling: &Spelling) -> Vec<Object> {
    let mut objects = parse(MANIFEST);
    for object in &mut objects {
        object.name = spelling.filled(&object.name);
        object.text = on_one_line(&spelling.filled(&object.text));
    }
    objects
}

fn parse(list: &str) -> Vec<Object> {
    let line = |line: &str| {
        let mut parts = line.splitn(3, '\t').map(str::to_owned);
        Some(Object { kind: parts.next()?, name: parts.next()?, text: parts.next()?, usable: true })
    };
    list.lines().filter_map(line).collect()
}

/// What is in a schema.
pub(super) async fn found(
    patient: &Patient,
    schema: &SchemaName,
    spelling: &Spelling,
) -> Result<Vec<Object>, NoAnswer> {
    let names = Names::expected();
    let params = [
        (&schema.as_str() as _, Type::TEXT),
        (&names.relations as _, Type::TEXT_ARRAY),
        (&names.functions as _, Type::TEXT_ARRAY),
    ];
    let rows = patient.rows(sql::OBJECTS, &params).await?;
    rows.iter().map(|row| object(row, spelling, &names)).collect()
}

/// One object from its row.
pub(crate) fn object(row: &Row, spelling: &Spelling, names: &Names) -> Result<Object, NoAnswer> {
    let (definition, body): (String, Option<String>) = (value(row, 2)?, value(row, 3)?);
    let mut text = on_one_line(&definition);
    if let Some(body) = body {
        let _ = write!(text, " body {}", hash(&spelling.neutral(&body.replace("\r\n", "\n"), names)));
    }
    Ok(Object { kind: value(row, 0)?, name: value(row, 1)?, text, usable: value(row, 4)? })
}

/// The server breaks lines as it sees fit.
fn on_one_line(definition: &str) -> String {
    definition.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A schema's name as the server words a literal in definitions, with `standard_conforming_strings` on.
fn literal(schema: &SchemaName) -> String {
    format!("'{}'", schema.as_str().replace('\'', "''"))
}

/// The first 64 bits of its SHA-256.
fn hash(body: &str) -> String {
    Sha256::digest(body).iter().take(8).fold(String::new(), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelling(schema: &str, identifier: &str) -> Spelling {
        let name = SchemaName::new(schema).unwrap();
        Spelling {
            identifier: identifier.to_owned(),
            quoted: name.identifier(),
            literal: literal(&name),
            mark: "0123abcd".to_owned(),
        }
    }

    fn names() -> Names {
        Names { relations: vec!["wh_outbox".to_owned()], functions: vec!["claim_work".to_owned()] }
    }

    #[test]
    fn a_schemas_name_is_left_open_where_an_object_of_ours_follows_and_nowhere_else() {
        let body = "select \"m\".claim_work(m.seq, xm.wh_outbox) from m.wh_outbox m, m.wh_outbox_2 -- mark_outbox_0123abcd";
        let neutral = spelling("m", "m").neutral(body, &names());
        assert_eq!(
            neutral,
            "select @schema@.claim_work(m.seq, xm.wh_outbox) from @schema@.wh_outbox m, m.wh_outbox_2 -- mark_outbox_@mark@"
        );
    }

    #[test]
    fn bodies_read_alike_in_any_schema() {
        let odd =
            spelling("Odd \"näme", "\"Odd \"\"näme\"").neutral("from \"Odd \"\"näme\".wh_outbox;", &names());
        assert_eq!(odd, spelling("a", "a").neutral("from \"a\".wh_outbox;", &names()));
        assert_eq!(odd, spelling("a", "a").neutral("from a.wh_outbox;", &names()));
    }

    #[test]
    fn the_list_names_every_work_table_and_what_claims() {
        let names = Names::expected();
        for table in ["wh_outbox", "wh_inbox", "wh_perspective_events", "wh_receptor_processing"] {
            assert!(names.relations.iter().any(|name| name == table), "{table}");
        }
        assert!(names.functions.iter().any(|name| name == "claim_work"));
        let (tables, views) = relations_with_rows();
        assert!(tables.contains(&"wh_outbox".to_owned()) && views.contains(&"wh_live_instances".to_owned()));
    }
}
