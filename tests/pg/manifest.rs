//! The list of what the migrations make (`src/doctor/manifest.txt`): written and checked here, from a migrated schema.

use std::fmt::Write as _;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::common;
use crate::doctor::manifest::{Names, Object, Spelling, expected, object};
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::doctor as sql;

/// A name that occurs nowhere else, and that needs no quotes.
const SCHEMA: &str = "workpump_listed_schema";
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/doctor/manifest.txt");

/// Everything of the schema, in the order of the list; with the names in it filled in.
async fn read(client: &Client, schema: &str) -> (Spelling, Vec<Object>) {
    let name = SchemaName::new(schema).expect("a schema name");
    let begin = sql::begin(60_000);
    client.batch_execute(&begin).await.expect("a transaction");
    let text = (&schema as _, Type::TEXT);
    let spelling = client.query_typed_one(sql::SPELLING, &[text]).await.expect("the spelling");
    let spelling = Spelling::read(&spelling, &name).expect("the spelling");
    let names = client.query_typed_one(sql::NAMES, &[(&schema as _, Type::TEXT)]).await.expect("names");
    let names = Names { relations: names.get(0), functions: names.get(1) };
    let params = [
        (&schema as _, Type::TEXT),
        (&names.relations as _, Type::TEXT_ARRAY),
        (&names.functions as _, Type::TEXT_ARRAY),
    ];
    let rows = client.query_typed(sql::OBJECTS, &params).await.expect("the objects");
    client.batch_execute(sql::END).await.expect("the end");
    let objects = rows.iter().map(|row| object(row, &spelling, &names).expect("an object"));
    let mut objects: Vec<_> = objects.collect();
    objects.sort();
    (spelling, objects)
}

#[tokio::test]
async fn the_manifest_lists_what_the_migrations_make() {
    let db = common::empty_database().await;
    workpump::migrate(db.url(), SCHEMA).await.expect("migrated");
    let (spelling, objects) = read(&db.connect().await, SCHEMA).await;
    let mut list = String::new();
    for object in &objects {
        assert!(object.usable, "{object:?}");
        let (name, text) = (spelling.opened(&object.name), spelling.opened(&object.text));
        writeln!(list, "{}\t{name}\t{text}", object.kind).expect("a String takes everything");
    }
    assert!(!list.contains(SCHEMA), "the schema's name is not left open everywhere");
    if std::env::var_os("WORKPUMP_TEST_UPDATE_MANIFEST").is_some() {
        std::fs::write(FILE, &list).expect("the manifest is written");
    }
    let listed = std::fs::read_to_string(FILE).expect("the manifest");
    for (line, wanted) in listed.lines().zip(list.lines()) {
        assert_eq!(
            line, wanted,
            "a migration changed: see src/doctor/manifest.rs for how to write the list anew"
        );
    }
    assert_eq!(listed.lines().count(), list.lines().count(), "write the list anew");
}

#[tokio::test]
async fn any_schema_reads_as_it_is_listed_whatever_its_name() {
    let db = common::empty_database().await;
    let client = db.connect().await;
    // Names of aliases, of categories, of keywords, of our own objects; names that have to be quoted.
    for schema in
        ["public", "m", "outbox", "select", "wh_outbox", "Odd \"na'me\\", "ümlaut.x  y", "@schema_text@"]
    {
        workpump::migrate(db.url(), schema).await.expect("migrated");
        let (spelling, objects) = read(&client, schema).await;
        let mut wanted = expected(&spelling);
        wanted.sort();
        for (found, wanted) in objects.iter().zip(&wanted) {
            assert_eq!(found, wanted, "schema {schema:?}");
        }
        assert_eq!(objects.len(), wanted.len(), "schema {schema:?}");
    }
}
