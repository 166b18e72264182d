//! What the role may do with the pump's tables and functions.
//!
//! The rule: a right is asked for by name, for every object, as the role that the pump logs in with; nothing is tried out.

use tokio_postgres::types::Type;

use super::ask::{NoAnswer, Patient, value};
use super::finding::{Check, Finding, Group, listed};
use super::manifest::{Names, relations_with_rows};
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::doctor as sql;

const SCHEMA: Check = Check(Group::Rights, "rights.schema");
const TABLES: Check = Check(Group::Rights, "rights.tables");
const FUNCTIONS: Check = Check(Group::Rights, "rights.functions");
const NOTIFY: Check = Check(Group::Rights, "rights.pg_notify");
const MIGRATE: Check = Check(Group::Rights, "rights.migrate");

/// Relations that the pump only reads.
const LEDGER: &str = "wh_schema_migrations";

/// What one role may do.
#[derive(Debug, Clone, Default)]
pub(super) struct Rights {
    pub(super) role: String,
    /// None: there is no such schema.
    pub(super) schema: Option<OnSchema>,
    /// Names and what is lacking.
    pub(super) tables: Vec<(String, String)>,
    pub(super) functions: Vec<String>,
}

/// Rights on the schema itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnSchema {
    pub(super) usage: bool,
    pub(super) create: bool,
    pub(super) notify: bool,
}

impl Rights {
    pub(super) async fn ask(patient: &Patient, schema: &SchemaName, role: &str) -> Result<Self, NoAnswer> {
        let name = (&schema.as_str() as _, Type::TEXT);
        let mut rights = Self { role: role.to_owned(), ..Self::default() };
        let Some(row) = patient.rows(sql::RIGHTS, &[name]).await?.into_iter().next() else {
            return Ok(rights);
        };
        let on = OnSchema { usage: value(&row, 1)?, create: value(&row, 2)?, notify: value(&row, 3)? };
        rights.schema = Some(on);
        let (tables, mut read) = relations_with_rows();
        let relations: Vec<String> = tables.iter().chain(&read).cloned().collect();
        read.push(LEDGER.to_owned());
        let functions = Names::expected().functions;
        let name = (&schema.as_str() as _, Type::TEXT);
        let params = [name, (&relations as _, Type::TEXT_ARRAY), (&read as _, Type::TEXT_ARRAY)];
        for row in patient.rows(sql::LACKING_TABLES, &params).await? {
            rights.tables.push((value(&row, 0)?, value(&row, 1)?));
        }
        let name = (&schema.as_str() as _, Type::TEXT);
        let params = [name, (&functions as _, Type::TEXT_ARRAY)];
        for row in patient.rows(sql::LACKING_FUNCTIONS, &params).await? {
            rights.functions.push(value(&row, 0)?);
        }
        Ok(rights)
    }

    /// Whether the schema can be looked into at all.
    pub(super) fn may_look(&self) -> bool {
        self.schema.is_none_or(|on| on.usage)
    }
}

/// What that means for the pump.
pub(super) fn judge(schema: &SchemaName, asked: &Result<Rights, NoAnswer>) -> Vec<Finding> {
    let rights = match asked {
        Ok(rights) => rights,
        Err(reason) => return vec![SCHEMA.not_made(reason)],
    };
    // Without a schema there is nothing to have rights on; the schema's own check says so.
    let Some(on) = rights.schema else { return Vec::new() };
    let (role, name) = (quoted(&rights.role), schema.identifier());
    let stands = "the pump fails when it needs it";
    let mut findings = Vec::new();
    if !on.usage {
        findings.push(
            SCHEMA
                .error(format!("role {role} may not use schema {schema}"), "nothing in it can be reached")
                .next(format!("GRANT USAGE ON SCHEMA {name} TO {role}")),
        );
    }
    if !rights.tables.is_empty() {
        let seen: Vec<_> =
            rights.tables.iter().map(|(table, lacking)| format!("{lacking} on {table}")).collect();
        let grants: Vec<_> = rights
            .tables
            .iter()
            .map(|(table, lacking)| format!("GRANT {lacking} ON {table} TO {role}"))
            .collect();
        findings.push(
            TABLES.error(format!("role {role} lacks {}", listed(&seen)), stands).next(grants.join("; ")),
        );
    }
    if !rights.functions.is_empty() {
        findings.push(
            FUNCTIONS
                .error(format!("role {role} may not call {}", listed(&rights.functions)), stands)
                .next(format!("GRANT EXECUTE ON ROUTINE {} TO {role}", rights.functions.join(", "))),
        );
    }
    if !on.notify {
        findings.push(
            NOTIFY
                .error(
                    format!("role {role} may not call pg_notify"),
                    "storing work rings the instances, and fails",
                )
                .next(format!("GRANT EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text) TO {role}")),
        );
    }
    if findings.is_empty() {
        findings.push(TABLES.ok(format!("role {role} may use every table and function of schema {schema}")));
    }
    if !on.create {
        let seen = format!("role {role} may not create anything in schema {schema}");
        findings
            .push(MIGRATE.note(seen, "the pump does not need it; migrations have to run as another role"));
    }
    for finding in &mut findings {
        finding.subject = Some(rights.role.clone());
    }
    findings
}

/// A role's name in a statement.
fn quoted(role: &str) -> String {
    format!("\"{}\"", role.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn judged(rights: Rights) -> Vec<Finding> {
        judge(&SchemaName::new("Shop").unwrap(), &Ok(rights))
    }

    fn all() -> Rights {
        let schema = Some(OnSchema { usage: true, create: true, notify: true });
        Rights { role: "app".to_owned(), schema, ..Rights::default() }
    }

    #[test]
    fn a_role_with_every_right_is_well_and_one_that_cannot_migrate_too() {
        let severities = |rights| judged(rights).into_iter().map(|f| f.severity).collect::<Vec<_>>();
        assert_eq!(severities(all()), [Severity::Ok]);
        let schema = Some(OnSchema { usage: true, create: false, notify: true });
        assert_eq!(severities(Rights { schema, ..all() }), [Severity::Ok, Severity::Note]);
        assert!(severities(Rights { schema: None, ..all() }).is_empty());
    }

    #[test]
    fn what_is_lacking_comes_with_the_grant() {
        let tables = vec![("\"Shop\".wh_outbox".to_owned(), "INSERT, DELETE".to_owned())];
        let functions = vec!["\"Shop\".claim_work(uuid)".to_owned()];
        let schema = Some(OnSchema { usage: false, create: true, notify: false });
        let steps: Vec<_> = judged(Rights { schema, tables, functions, ..all() })
            .into_iter()
            .inspect(|finding| assert_eq!(finding.severity, Severity::Error))
            .filter_map(|finding| finding.next_step)
            .collect();
        assert_eq!(
            steps,
            [
                "GRANT USAGE ON SCHEMA \"Shop\" TO \"app\"",
                "GRANT INSERT, DELETE ON \"Shop\".wh_outbox TO \"app\"",
                "GRANT EXECUTE ON ROUTINE \"Shop\".claim_work(uuid) TO \"app\"",
                "GRANT EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text) TO \"app\"",
            ]
        );
    }
}
