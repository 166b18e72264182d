//! Schemas that are not as the migrations make them.

use workpump::doctor::Finding;
use workpump::doctor::Severity::{Error, Note, Ok as Well, Warning};

use super::common;
use super::{assert_healthy, examine, of, only, problems, run};

/// What the doctor finds about one check after `sql`, and nothing else may be wrong.
async fn after(sql: &str, check: &str) -> Vec<Finding> {
    let db = common::database().await;
    run(&db.connect().await, sql).await;
    let diagnosis = examine(db.url()).await;
    assert!(problems(&diagnosis).iter().all(|problem| *problem == check), "{sql}: {:#?}", diagnosis.findings);
    assert!(of(&diagnosis, "schema.objects").is_empty(), "{sql}");
    of(&diagnosis, check).into_iter().cloned().collect()
}

#[tokio::test]
async fn a_healthy_schema_with_an_odd_name_is_healthy() {
    let db = common::empty_database().await;
    for schema in ["Odd \"na'me", "outbox"] {
        workpump::migrate(db.url(), schema).await.expect("migrated");
        let diagnosis = workpump::doctor(db.url(), Some(db.url()), schema).await.expect("a diagnosis");
        assert_healthy(&diagnosis);
        only(&diagnosis, "schema.objects", Well);
    }
}

#[tokio::test]
async fn a_missing_schema_and_one_that_is_behind_are_errors() {
    let db = common::empty_database().await;
    let diagnosis = examine(db.url()).await;
    let missing = only(&diagnosis, "schema.version", Error);
    assert!(
        missing.next_step.as_deref().is_some_and(|step| step.contains("workpump migrate")),
        "{missing:?}"
    );
    assert_eq!(problems(&diagnosis), ["schema.version"]);
    let nowhere = workpump::doctor(db.url(), None, "nowhere").await.expect("a diagnosis");
    only(&nowhere, "schema.version", Error);

    let db = common::database().await;
    run(&db.connect().await, "delete from wh_schema_migrations where name >= '0065'").await;
    let diagnosis = examine(db.url()).await;
    assert!(only(&diagnosis, "schema.version", Error).seen.contains("0065_doorbells"));
    assert!(of(&diagnosis, "schema.objects").is_empty(), "the list is that of another state");
}

#[tokio::test]
async fn a_schema_of_a_newer_library_is_a_note_or_an_error_as_the_ledger_says() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "insert into wh_schema_migrations values ('9999_later', 'x', '0.1.0')").await;
    let diagnosis = examine(db.url()).await;
    only(&diagnosis, "schema.version", Note);
    assert_healthy(&diagnosis);
    run(&client, "update wh_schema_migrations set min_library = '99.0.0' where name = '9999_later'").await;
    assert!(only(&examine(db.url()).await, "schema.version", Error).seen.contains("99.0.0"));
}

#[tokio::test]
async fn a_ledger_with_another_checksum_is_an_error_and_the_objects_are_still_compared() {
    let db = common::database().await;
    run(&db.connect().await, "update wh_schema_migrations set checksum = 'x' where name = '0030_claim'")
        .await;
    let diagnosis = examine(db.url()).await;
    assert!(only(&diagnosis, "schema.version", Error).seen.contains("0030_claim"));
    only(&diagnosis, "schema.objects", Well);
}

#[tokio::test]
async fn a_dropped_index_is_found_and_its_statement_makes_the_schema_healthy_again() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "drop index wh_outbox_fresh").await;
    let diagnosis = examine(db.url()).await;
    let index = only(&diagnosis, "schema.index", Error);
    assert_eq!(index.subject.as_deref(), Some("wh_outbox.wh_outbox_fresh"));
    run(&client, index.next_step.as_deref().expect("a next step")).await;
    assert_healthy(&examine(db.url()).await);
}

#[tokio::test]
async fn an_invalid_index_is_found_and_its_statement_makes_the_schema_healthy_again() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "update pg_index set indisvalid = false where indexrelid = 'wh_inbox_due'::regclass").await;
    let diagnosis = examine(db.url()).await;
    let index = only(&diagnosis, "schema.index", Error);
    assert_eq!(index.seen, "index wh_inbox.wh_inbox_due is invalid");
    run(&client, index.next_step.as_deref().expect("a next step")).await;
    assert_healthy(&examine(db.url()).await);
}

#[tokio::test]
async fn what_a_failed_concurrent_index_leaves_behind_is_found() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "insert into wh_outbox (message_type, payload, processed_at) select 'a', '{}', now() from generate_series(1, 2)").await;
    let failed =
        client.batch_execute("create unique index concurrently mine on wh_outbox (message_type)").await;
    assert!(failed.is_err(), "two rows have one type");
    let diagnosis = examine(db.url()).await;
    let index = only(&diagnosis, "schema.index", Warning);
    assert_eq!(index.subject.as_deref(), Some("wh_outbox.mine"));
    run(&client, index.next_step.as_deref().expect("a next step")).await;
    assert_healthy(&examine(db.url()).await);
}

#[tokio::test]
async fn a_replaced_function_is_found_by_its_body_and_by_its_properties() {
    let body = "create or replace function wh_lock_held(p_instance_id uuid) returns boolean language sql volatile cost 10000 \
                set search_path = pg_catalog, public, pg_temp as 'select true'";
    let found = after(body, "schema.function").await;
    assert_eq!(found[0].seen, "function wh_lock_held(uuid) has another body");
    let short = "create or replace function compute_partition(p_stream_id uuid, p_partition_count int default 10000) returns int \
                 language sql immutable parallel safe return 1";
    for sql in [
        short,
        "alter function claim_instance_alive_lock(uuid) reset all",
        "alter function wh_takers(text) security definer",
    ] {
        let found = after(sql, "schema.function").await;
        assert_eq!(found.len(), 1, "{sql}: {found:?}");
        assert!(found[0].seen.contains("has another definition"), "{found:?}");
    }
    let found = after("drop function wh_pass_ring(uuid)", "schema.function").await;
    assert_eq!(found[0].seen, "function wh_pass_ring(uuid) is missing");
    let overload = "create function deregister_instance(text) returns boolean language sql return true";
    assert_eq!(after(overload, "schema.function").await[0].severity, Warning);
}

#[tokio::test]
async fn columns_that_are_missing_changed_or_added_are_found() {
    let judged = async |sql| after(sql, "schema.column").await.remove(0);
    assert_eq!(judged("alter table wh_dead_letters drop column name").await.severity, Error);
    let changed = judged("alter table wh_outbox alter column crash_count type bigint").await;
    assert!(changed.seen.contains("bigint") && changed.severity == Error, "{changed:?}");
    assert_eq!(judged("alter table wh_outbox alter column attempts drop default").await.severity, Error);
    assert_eq!(judged("alter table wh_outbox add column mine text").await.severity, Note);
    let filled = judged("alter table wh_outbox add column mine text not null").await;
    assert_eq!(filled.severity, Error, "{filled:?}");
}

#[tokio::test]
async fn triggers_and_constraints_that_are_off_or_gone_are_found() {
    let db = common::database().await;
    let client = db.connect().await;
    run(
        &client,
        "alter table wh_outbox disable trigger wh_work_arrived; drop trigger wh_work_arrived on wh_inbox",
    )
    .await;
    let diagnosis = examine(db.url()).await;
    let seen: Vec<_> = of(&diagnosis, "schema.trigger").iter().map(|finding| finding.seen.clone()).collect();
    assert_eq!(
        seen,
        ["trigger wh_inbox.wh_work_arrived is missing", "trigger wh_outbox.wh_work_arrived is switched off"]
    );
    for trigger in of(&diagnosis, "schema.trigger") {
        run(&client, trigger.next_step.as_deref().expect("a next step")).await;
    }
    assert_healthy(&examine(db.url()).await);
    let judged = async |sql| after(sql, "schema.constraint").await.remove(0);
    assert_eq!(
        judged("alter table wh_outbox drop constraint wh_outbox_attempts_check").await.severity,
        Error
    );
    assert_eq!(
        judged("alter table wh_outbox add constraint mine check (attempts < 3)").await.severity,
        Warning
    );
}

#[tokio::test]
async fn tables_that_are_gone_unlogged_or_under_row_security_are_found() {
    let gone = after("drop table wh_message_deduplication", "schema.table").await;
    assert_eq!(gone[0].seen, "table wh_message_deduplication is missing");
    for sql in ["alter table wh_inbox set unlogged", "alter table wh_outbox enable row level security"] {
        assert_eq!(after(sql, "schema.table").await[0].severity, Error, "{sql}");
    }
}

#[tokio::test]
async fn what_others_keep_in_the_same_schema_and_what_operators_tune_is_left_alone() {
    let db = common::database().await;
    let client = db.connect().await;
    run(
        &client,
        "create table mine (a int); create function mine() returns int language sql return 1; \
         alter table wh_outbox set (autovacuum_vacuum_scale_factor = 0.01, fillfactor = 90); \
         alter function claim_work(uuid, int, int, int, text[], int, bigint) owner to postgres; \
         grant select on wh_outbox to public; comment on table wh_outbox is 'mine'",
    )
    .await;
    let diagnosis = examine(db.url()).await;
    only(&diagnosis, "schema.objects", Well);
    assert_healthy(&diagnosis);
}
