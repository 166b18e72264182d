//! Roles that may not do everything.

use workpump::doctor::Severity::{Error, Note, Ok as Well};

use super::common;
use super::{assert_healthy, examine, of, only, problems, run};

#[tokio::test]
async fn a_role_with_the_rights_of_the_readme_is_healthy_and_cannot_migrate() {
    let db = common::database().await;
    run(
        &db.connect().await,
        "create role clerk login; grant usage on schema public to clerk; \
         grant select, insert, update, delete on all tables in schema public to clerk; \
         grant usage on all sequences in schema public to clerk",
    )
    .await;
    let diagnosis = examine(&db.url_as("clerk")).await;
    assert_healthy(&diagnosis);
    only(&diagnosis, "rights.tables", Well);
    only(&diagnosis, "rights.migrate", Note);
    // Other roles' sessions are hidden from it.
    assert!(of(&diagnosis, "activity.horizon").iter().any(|finding| finding.severity == Note));
}

#[tokio::test]
async fn rights_that_are_missing_come_with_the_grants_that_help() {
    let db = common::database().await;
    let client = db.connect().await;
    run(
        &client,
        "create role intern login; grant usage on schema public to intern; \
         grant select, insert, update, delete on all tables in schema public to intern; \
         grant usage on sequence wh_inbox_seq_seq, wh_perspective_events_seq_seq, wh_receptor_processing_seq_seq to intern; \
         revoke update, delete on wh_inbox from intern; revoke all on function record_heartbeat from public",
    )
    .await;
    let url = db.url_as("intern");
    let diagnosis = examine(&url).await;
    assert_eq!(problems(&diagnosis), ["rights.tables", "rights.functions"]);
    let tables = only(&diagnosis, "rights.tables", Error);
    assert!(
        tables.seen.contains("UPDATE, DELETE on public.wh_inbox")
            || tables.seen.contains("UPDATE, DELETE on wh_inbox"),
        "{tables:?}"
    );
    assert!(
        tables.seen.contains("USAGE on SEQUENCE ") && tables.seen.contains("wh_outbox_seq_seq"),
        "{tables:?}"
    );
    for check in ["rights.tables", "rights.functions"] {
        run(&client, only(&diagnosis, check, Error).next_step.as_deref().expect("a grant")).await;
    }
    assert_healthy(&examine(&url).await);
}

#[tokio::test]
async fn without_the_right_to_the_schema_the_rest_is_still_looked_at() {
    let db = common::empty_database().await;
    workpump::migrate(db.url(), "Shop").await.expect("migrated");
    let client = db.connect().await;
    run(&client, "create role guest login").await;
    let diagnosis = workpump::doctor(&db.url_as("guest"), None, "Shop").await.expect("a diagnosis");
    let schema = only(&diagnosis, "rights.schema", Error);
    assert_eq!(schema.next_step.as_deref(), Some("GRANT USAGE ON SCHEMA \"Shop\" TO \"guest\""));
    only(&diagnosis, "server.clock", Well);
    only(&diagnosis, "connections.notify", Well);
}

#[tokio::test]
async fn the_role_of_the_direct_url_is_looked_at_too() {
    let db = common::database().await;
    run(
        &db.connect().await,
        "create role listener login; revoke all on function claim_instance_alive_lock from public",
    )
    .await;
    let diagnosis =
        workpump::doctor(db.url(), Some(&db.url_as("listener")), "public").await.expect("a diagnosis");
    let functions = only(&diagnosis, "rights.functions", Error);
    assert_eq!(functions.subject.as_deref(), Some("listener"));
    assert!(functions.seen.contains("claim_instance_alive_lock(uuid)"), "{functions:?}");
}
