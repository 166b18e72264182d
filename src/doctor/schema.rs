//! Whether the schema is the one that this library needs.
//!
//! The rule: first the ledger, then every object that a migration made, compared with the list of `manifest.rs`. Other people's tables and
//! functions in the same schema are not looked at; what they hang on ours is.

use std::time::Duration;

use super::ask::{NoAnswer, Patient};
use super::finding::{Check, Finding, Group, listed};
use super::manifest::{self, Object, Spelling};
use crate::pg::migrate::{LIBRARY_VERSION, MigrateError, SchemaState, schema_state};
use crate::pg::schema_name::SchemaName;

const VERSION: Check = Check(Group::Schema, "schema.version");
const OBJECTS: Check = Check(Group::Schema, "schema.objects");
const RELATION: Check = Check(Group::Schema, "schema.table");
const COLUMN: Check = Check(Group::Schema, "schema.column");
const INDEX: Check = Check(Group::Schema, "schema.index");
const CONSTRAINT: Check = Check(Group::Schema, "schema.constraint");
const TRIGGER: Check = Check(Group::Schema, "schema.trigger");
const FUNCTION: Check = Check(Group::Schema, "schema.function");

/// How long the ledger is waited for.
const LEDGER: Duration = Duration::from_secs(4);

/// What became of the look at the schema.
pub(super) struct Looked {
    pub(super) findings: Vec<Finding>,
    /// Whether the tables and functions are there to be asked.
    pub(super) usable: bool,
}

/// Reads the ledger, and compares the objects where the list is the one of this ledger.
pub(super) async fn look(patient: &Patient, schema: &SchemaName) -> Looked {
    let asked = patient.answer(LEDGER, schema_state(patient.client(), schema.as_str())).await;
    let state = match asked {
        Ok(Err(error @ MigrateError::Database { .. })) => Err(NoAnswer::new(error.to_string())),
        other => other,
    };
    let state = match state {
        Ok(state) => state,
        Err(unknown) => return Looked { findings: vec![VERSION.not_made(unknown)], usable: false },
    };
    let mut findings = vec![judge_version(schema.as_str(), &state)];
    let comparable = matches!(state, Ok(SchemaState::Current) | Err(MigrateError::Changed { .. }));
    let usable = comparable || matches!(state, Ok(SchemaState::Ahead { .. }));
    if comparable {
        match objects(patient, schema).await {
            Ok((identifier, expected, found)) => findings.extend(compare(&identifier, &expected, &found)),
            Err(unknown) => findings.push(OBJECTS.not_made(unknown)),
        }
    }
    Looked { findings, usable }
}

async fn objects(
    patient: &Patient,
    schema: &SchemaName,
) -> Result<(String, Vec<Object>, Vec<Object>), NoAnswer> {
    let spelling = Spelling::ask(patient, schema).await?;
    let found = manifest::found(patient, schema, &spelling).await?;
    Ok((spelling.identifier().to_owned(), manifest::expected(&spelling), found))
}

/// What the ledger says.
fn judge_version(schema: &str, state: &Result<SchemaState, MigrateError>) -> Finding {
    let stands_still = "nothing of this library can run on it";
    match state {
        Ok(SchemaState::Current) => VERSION.ok(format!("schema {schema:?} is at workpump {LIBRARY_VERSION}")),
        Ok(SchemaState::Missing) => VERSION
            .error(format!("there is no pump in schema {schema:?}"), stands_still)
            .next("run `workpump migrate`, or check the schema's name"),
        Ok(SchemaState::Behind { missing }) => VERSION
            .error(format!("schema {schema:?} lacks {}", listed(missing)), "this library needs them and refuses to start")
            .next("run `workpump migrate`"),
        Ok(SchemaState::Ahead { unknown }) => VERSION
            .note(
                format!("schema {schema:?} was migrated by a newer workpump ({})", listed(unknown)),
                "this library may run on it, but cannot tell whether its objects are as they should be",
            )
            .next("run the doctor of the newer version"),
        Ok(SchemaState::NeedsNewerLibrary { migration, required }) => VERSION
            .error(format!("schema {schema:?} needs workpump {required} or newer (migration {migration}), this is {LIBRARY_VERSION}"), stands_still)
            .next(format!("upgrade this program to {required}")),
        Err(error) => VERSION
            .error(error.to_string(), "the schema and this library do not have the same history")
            .next("use the library that migrated the schema, or restore the schema"),
    }
}

/// Every difference between what should be there and what is.
fn compare(schema: &str, expected: &[Object], found: &[Object]) -> Vec<Finding> {
    let same = |one: &Object, other: &Object| one.kind == other.kind && one.name == other.name;
    let has = |objects: &[Object], object: &Object| objects.iter().any(|other| same(other, object));
    let gone = |object: &Object| {
        object.kind != "relation"
            && object.relation().is_some_and(|relation| {
                !found.iter().any(|other| other.kind == "relation" && other.name == relation)
            })
    };
    let mut findings = Vec::new();
    for object in expected.iter().filter(|object| !gone(object)) {
        match found.iter().find(|other| same(other, object)) {
            None => findings.push(missing(schema, object)),
            Some(other) if other.text != object.text => findings.push(different(object, other)),
            Some(other) if !other.usable => findings.push(out_of_force(schema, object)),
            Some(_) => {}
        }
    }
    findings.extend(found.iter().filter(|object| !has(expected, object)).map(|object| extra(schema, object)));
    if findings.is_empty() {
        findings.push(OBJECTS.ok(format!("{} objects are as the migrations make them", expected.len())));
    }
    findings
}

fn check(object: &Object) -> Check {
    match object.kind.as_str() {
        "relation" => RELATION,
        "column" => COLUMN,
        "index" => INDEX,
        "constraint" => CONSTRAINT,
        "trigger" => TRIGGER,
        _ => FUNCTION,
    }
}

/// The kind and the name, for people.
fn named(object: &Object) -> String {
    let kind = if object.kind == "relation" {
        object.text.split(' ').next().unwrap_or("table")
    } else {
        &object.kind
    };
    format!("{kind} {}", object.name)
}

fn why(object: &Object) -> &'static str {
    match object.kind.as_str() {
        "index" => "claims and sweeps walk along this index; without it they read whole tables",
        "trigger" => "it rings the instances when work arrives; without it work waits for the next poll",
        "constraint" => "it keeps rows out that the pump cannot handle",
        "function" => "the pump's guarantees rest on this function, word by word",
        _ => "statements of the pump rely on it",
    }
}

/// How to get an object back whose definition is no statement.
const RESTORE: &str = "find out who changed it; to see what belongs there, run `workpump migrate --schema <a new name>` on a test database, \
     and restore it from `pg_dump --schema-only` of that schema";

fn missing(schema: &str, object: &Object) -> Finding {
    let (table, name) = object.name.split_once('.').unwrap_or(("", &object.name));
    let next = match object.kind.as_str() {
        "index" => object.text.replacen("INDEX ", "INDEX CONCURRENTLY ", 1),
        "trigger" => object.text.clone(),
        "constraint" => format!("ALTER TABLE {schema}.{table} ADD CONSTRAINT {name} {}", object.text),
        _ => RESTORE.to_owned(),
    };
    check(object).error(format!("{} is missing", named(object)), why(object)).about(&object.name).next(next)
}

fn different(object: &Object, found: &Object) -> Finding {
    let seen = match (object.text.rsplit_once(" body "), found.text.rsplit_once(" body ")) {
        (Some((one, _)), Some((other, _))) if one == other => format!("{} has another body", named(object)),
        _ if object.kind == "function" || object.text.len() + found.text.len() > 300 => {
            format!("{} has another definition", named(object))
        }
        _ => format!("{} is `{}` instead of `{}`", named(object), found.text, object.text),
    };
    check(object).error(seen, why(object)).about(&object.name).next(RESTORE)
}

fn out_of_force(schema: &str, object: &Object) -> Finding {
    let (table, name) = object.name.split_once('.').unwrap_or(("", &object.name));
    let (state, next) = match object.kind.as_str() {
        "index" => ("is invalid", format!("REINDEX INDEX CONCURRENTLY {schema}.{name}")),
        "trigger" => ("is switched off", format!("ALTER TABLE {schema}.{table} ENABLE TRIGGER {name}")),
        _ => ("was never checked", format!("ALTER TABLE {schema}.{table} VALIDATE CONSTRAINT {name}")),
    };
    check(object).error(format!("{} {state}", named(object)), why(object)).about(&object.name).next(next)
}

/// Somebody else's object on a table of ours, or a function of the same name as one of ours.
fn extra(schema: &str, object: &Object) -> Finding {
    let (check, seen) = (check(object), format!("{} is not of this library", named(object)));
    let (table, name) = object.name.split_once('.').unwrap_or(("", &object.name));
    let finding = match object.kind.as_str() {
        "column" if object.text.ends_with(" not null") => check
            .error(
                format!("{seen}, and has to be filled in"),
                "the pump does not know it: nothing can be stored any more",
            )
            .next(format!(
                "ALTER TABLE {schema}.{table} ALTER COLUMN {name} DROP NOT NULL, or drop the column"
            )),
        "column" => check
            .note(seen, "the pump leaves it alone; a migration may bring one of the same name")
            .next("keep your own data in a table of your own"),
        "index" if !object.usable => check
            .warning(format!("{seen}, and is invalid"), "every write keeps it up, and nothing can use it")
            .next(format!("DROP INDEX CONCURRENTLY {schema}.{name}")),
        "index" => check.note(seen, "every claim and settlement has to keep it up"),
        "constraint" => {
            check.warning(seen, "rows it refuses can be neither stored nor settled").next(format!(
                "ALTER TABLE {schema}.{table} DROP CONSTRAINT {name}, unless you know that it never refuses"
            ))
        }
        "trigger" => {
            check.note(seen, "it runs inside the pump's statements, and what it refuses the pump cannot do")
        }
        _ => check
            .warning(seen, "calls of the pump may find it instead of its own")
            .next(format!("DROP ROUTINE {schema}.{}", object.name)),
    };
    finding.about(&object.name)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn object(kind: &str, name: &str, text: &str) -> Object {
        Object { kind: kind.to_owned(), name: name.to_owned(), text: text.to_owned(), usable: true }
    }

    fn schema() -> Vec<Object> {
        vec![
            object("relation", "t", "table"),
            object("column", "t.a", "integer not null"),
            object("index", "t.i", "CREATE INDEX i ON s.t USING btree (a)"),
            object("trigger", "t.r", "CREATE TRIGGER r"),
            object("function", "f(uuid)", "function () returns uuid body 12"),
        ]
    }

    fn differences(found: &[Object]) -> Vec<(Severity, String)> {
        compare("s", &schema(), found).into_iter().map(|finding| (finding.severity, finding.seen)).collect()
    }

    #[test]
    fn a_schema_as_it_should_be_is_one_finding() {
        assert_eq!(
            differences(&schema()),
            [(Severity::Ok, "5 objects are as the migrations make them".to_owned())]
        );
    }

    #[test]
    fn what_belongs_to_a_missing_table_is_not_reported_one_by_one() {
        let found = [schema().remove(4)];
        assert_eq!(differences(&found), [(Severity::Error, "table t is missing".to_owned())]);
    }

    #[test]
    fn each_difference_is_named_with_its_weight() {
        let mut found = schema();
        found[1].text = "bigint not null".to_owned();
        found[2].usable = false;
        found[3].usable = false;
        found[4].text = "function () returns uuid body 13".to_owned();
        found.push(object("column", "t.b", "text"));
        found.push(object("column", "t.c", "text not null"));
        found.push(object("function", "f(text)", "function () returns uuid body 12"));
        let error = |seen: &str| (Severity::Error, seen.to_owned());
        assert_eq!(
            differences(&found),
            [
                error("column t.a is `bigint not null` instead of `integer not null`"),
                error("index t.i is invalid"),
                error("trigger t.r is switched off"),
                error("function f(uuid) has another body"),
                (Severity::Note, "column t.b is not of this library".to_owned()),
                error("column t.c is not of this library, and has to be filled in"),
                (Severity::Warning, "function f(text) is not of this library".to_owned()),
            ]
        );
    }

    #[test]
    fn a_missing_index_comes_with_the_statement_that_makes_it() {
        let mut found = schema();
        found.remove(2);
        let finding = compare("s", &schema(), &found).remove(0);
        assert_eq!(finding.next_step.as_deref(), Some("CREATE INDEX CONCURRENTLY i ON s.t USING btree (a)"));
    }

    #[test]
    fn every_state_of_the_ledger_but_the_current_one_says_what_to_do() {
        let names = || vec!["0010_x".to_owned()];
        for (state, severity) in [
            (Ok(SchemaState::Current), Severity::Ok),
            (Ok(SchemaState::Missing), Severity::Error),
            (Ok(SchemaState::Behind { missing: names() }), Severity::Error),
            (Ok(SchemaState::Ahead { unknown: names() }), Severity::Note),
            (
                Ok(SchemaState::NeedsNewerLibrary {
                    migration: "x".to_owned(),
                    required: "9.0.0".to_owned(),
                }),
                Severity::Error,
            ),
        ] {
            let finding = judge_version("s", &state);
            assert_eq!(finding.severity, severity, "{state:?}");
            assert_eq!(finding.next_step.is_none(), severity == Severity::Ok, "{state:?}");
        }
    }
}
