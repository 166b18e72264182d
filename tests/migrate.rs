//! Migrations: whoever starts, however many, and however they end, there is one schema or none.

mod common;

use std::process::Command;

use common::wait::PATIENCE;
use futures_util::future::join_all;
use tokio_postgres::Client;
use workpump::embedded::ServerPrograms;
use workpump::{LIBRARY_VERSION, MigrateError, SchemaState, migrate, migrate_on, schema_state};

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("a count").get(0)
}

async fn advisory_locks(client: &Client) -> i64 {
    count(client, "select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())").await
}

/// Starts `starters` migrations at once; one of them may do the work.
async fn start_at_once(url: &str, starters: usize) {
    let results = join_all((0..starters).map(|_| migrate(url, "public"))).await;
    let applied: Vec<_> =
        results.into_iter().map(|result| result.expect("every starter succeeds").applied.len()).collect();
    assert_eq!(applied.iter().filter(|applied| **applied > 0).count(), 1, "{applied:?}");
}

#[tokio::test]
async fn twenty_starters_at_once_migrate_once_and_leave_no_lock() {
    let db = common::empty_database().await;
    start_at_once(db.url(), 20).await;
    let client = db.connect().await;
    assert_eq!(schema_state(&client, "public").await.unwrap(), SchemaState::Current);
    assert_eq!(advisory_locks(&client).await, 0);
    assert_eq!(migrate(db.url(), "public").await.unwrap().applied, Vec::<String>::new());
}

#[tokio::test]
async fn twenty_starters_through_a_pooler_migrate_once_and_leave_no_lock() {
    let db = common::empty_database().await;
    let Some(bouncer) = common::Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    start_at_once(&bouncer.url(db.name()), 20).await;
    let client = db.connect().await;
    assert_eq!(schema_state(&client, "public").await.unwrap(), SchemaState::Current);
    assert_eq!(advisory_locks(&client).await, 0);
}

#[tokio::test]
async fn two_schemas_with_odd_names_live_in_one_database_and_do_not_mix() {
    let db = common::empty_database().await;
    let client = db.connect().await;
    for schema in ["Order \"Desk\"", "it's a;select\n--\\ schema", "ümläut", "@schema_text@", "select"] {
        migrate(db.url(), schema).await.unwrap_or_else(|e| panic!("{schema}: {e}"));
        assert_eq!(schema_state(&client, schema).await.unwrap(), SchemaState::Current, "{schema}");
        let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
        let stored = format!(
            "select count(*) from {quoted}.store_outbox_messages('[{{\"message_type\": \"a\", \"payload\": 1, \"stream_id\": \"018f0000-0000-7000-8000-000000000001\"}}]')"
        );
        assert_eq!(count(&client, &stored).await, 1, "{schema}");
        let beat = format!(
            "select {quoted}.record_heartbeat('018f0000-0000-7000-8000-000000000002', 's', 'h', 1)::int::int8"
        );
        assert_eq!(count(&client, &beat).await, 1, "{schema}");
        assert_eq!(count(&client, &format!("select count(*) from {quoted}.wh_outbox")).await, 1, "{schema}");
    }
    let stray = "select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname in ('public', 'pg_catalog') and c.relname like 'wh\\_%'";
    assert_eq!(count(&client, stray).await, 0);
    let channel =
        |schema: &str| format!("select {schema}.wh_work_channel('018f0000-0000-7000-8000-000000000002')");
    let one: String = client.query_one(&channel("\"select\""), &[]).await.unwrap().get(0);
    let two: String = client.query_one(&channel("\"ümläut\""), &[]).await.unwrap().get(0);
    assert_ne!(one, two);
}

#[tokio::test]
async fn names_that_cannot_be_a_schema_are_refused_before_anything_is_sent() {
    let db = common::empty_database().await;
    let mut client = db.connect().await;
    for schema in ["", "a$wh$b", "nul\0", &"x".repeat(64)] {
        let error = migrate_on(&mut client, schema).await.unwrap_err();
        assert!(matches!(error, MigrateError::SchemaName(_)), "{schema:?}: {error}");
    }
}

#[tokio::test]
async fn a_changed_migration_is_refused_by_name_and_nothing_is_written() {
    let db = common::empty_database().await;
    migrate(db.url(), "public").await.unwrap();
    let client = db.connect().await;
    client.batch_execute("update wh_schema_migrations set checksum = 'other' where name = '0050_heartbeat'; delete from wh_schema_migrations where name = '0070_store'").await.unwrap();
    let error = migrate(db.url(), "public").await.unwrap_err();
    assert!(
        matches!(&error, MigrateError::Changed { name, applied, .. } if name == "0050_heartbeat" && applied == "other"),
        "{error}"
    );
    assert!(error.to_string().contains("0050_heartbeat"), "{error}");
    assert!(matches!(schema_state(&client, "public").await, Err(MigrateError::Changed { .. })));
    assert_eq!(
        count(&client, "select count(*) from wh_schema_migrations where name = '0070_store'").await,
        0
    );
}

#[tokio::test]
async fn a_schema_that_needs_a_newer_library_is_refused_with_both_versions() {
    let db = common::empty_database().await;
    migrate(db.url(), "public").await.unwrap();
    let client = db.connect().await;
    client
        .batch_execute("insert into wh_schema_migrations values ('9000_future', 'c', '99.0.0')")
        .await
        .unwrap();
    let error = migrate(db.url(), "public").await.unwrap_err();
    assert!(
        matches!(&error, MigrateError::NeedsNewerLibrary { required, own, .. } if required == "99.0.0" && own == LIBRARY_VERSION),
        "{error}"
    );
    for part in ["99.0.0", LIBRARY_VERSION, "9000_future"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let state = schema_state(&client, "public").await.unwrap();
    assert_eq!(
        state,
        SchemaState::NeedsNewerLibrary { migration: "9000_future".into(), required: "99.0.0".into() }
    );
}

#[tokio::test]
async fn an_older_library_starts_on_a_newer_schema_that_allows_it_and_changes_nothing() {
    let db = common::empty_database().await;
    migrate(db.url(), "public").await.unwrap();
    let client = db.connect().await;
    let newer = format!(
        "insert into wh_schema_migrations values ('9000_future', 'c', '{LIBRARY_VERSION}'); \
        create or replace function wh_work_channel(p_instance_id uuid) returns text language sql immutable return 'from the future'"
    );
    client.batch_execute(&newer).await.unwrap();
    let migrated = migrate(db.url(), "public").await.unwrap();
    assert_eq!((migrated.applied.len(), migrated.unknown), (0, vec!["9000_future".to_owned()]));
    assert_eq!(
        schema_state(&client, "public").await.unwrap(),
        SchemaState::Ahead { unknown: vec!["9000_future".into()] }
    );
    let kept: String =
        client.query_one("select wh_work_channel(gen_random_uuid())", &[]).await.unwrap().get(0);
    assert_eq!(kept, "from the future");
    // A newer schema that lacks one of ours was made by another line of versions: hands off.
    client.batch_execute("delete from wh_schema_migrations where name = '0070_store'").await.unwrap();
    let error = migrate(db.url(), "public").await.unwrap_err();
    assert!(matches!(error, MigrateError::Diverged { .. }), "{error}");
}

#[tokio::test]
async fn a_missing_and_a_half_applied_schema_are_told_apart() {
    let db = common::empty_database().await;
    let client = db.connect().await;
    assert_eq!(schema_state(&client, "public").await.unwrap(), SchemaState::Missing);
    assert_eq!(schema_state(&client, "not there").await.unwrap(), SchemaState::Missing);
    migrate(db.url(), "public").await.unwrap();
    client.batch_execute("delete from wh_schema_migrations where name = '0070_store'; drop function store_outbox_messages, store_inbox_messages, store_perspective_events, store_receptor_work, wh_check_stored").await.unwrap();
    assert_eq!(
        schema_state(&client, "public").await.unwrap(),
        SchemaState::Behind { missing: vec!["0070_store".into()] }
    );
    assert_eq!(migrate(db.url(), "public").await.unwrap().applied, ["0070_store"]);
}

#[tokio::test]
async fn a_restored_dump_is_current_and_works() {
    let (old, new) = (common::empty_database().await, common::empty_database().await);
    migrate(old.url(), "Pump").await.unwrap();
    let stored = "select count(*) from \"Pump\".store_outbox_messages('[{\"message_type\": \"a\", \"payload\": 1, \"stream_id\": \"018f0000-0000-7000-8000-000000000001\"}]')";
    assert_eq!(count(&old.connect().await, stored).await, 1);
    let Some(programs) = client_programs() else {
        eprintln!("skipped: no pg_dump and psql beside the server programs");
        return;
    };
    let file = std::env::temp_dir().join(format!("workpump-dump-{}.sql", std::process::id()));
    let dump = Command::new(programs.join("pg_dump"))
        .args(["--no-comments", "--no-privileges", "-d", old.url(), "-f"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(dump.status.success(), "{dump:?}");
    let restore = Command::new(programs.join("psql"))
        .args(["-q", "-v", "ON_ERROR_STOP=1", "-d", new.url(), "-f"])
        .arg(&file)
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(restore.status.success(), "{restore:?}");
    let client = new.connect().await;
    assert_eq!(schema_state(&client, "Pump").await.unwrap(), SchemaState::Current);
    assert_eq!(migrate(new.url(), "Pump").await.unwrap().applied.len(), 0);
    assert_eq!(count(&client, stored).await, 1);
    assert_eq!(count(&client, "select count(distinct seq) from \"Pump\".wh_outbox").await, 2);
}

fn client_programs() -> Option<std::path::PathBuf> {
    let found = ServerPrograms::find().ok()?;
    let dir = found.bin_dir().to_owned();
    ["pg_dump", "psql"].iter().all(|program| dir.join(program).is_file()).then_some(dir)
}

#[tokio::test]
async fn a_plain_owner_of_the_schema_migrates_and_a_runtime_role_without_ddl_runs() {
    let db = common::empty_database().await;
    let admin = db.connect().await;
    let (owner, runtime) = (format!("owner_{}", db.name()), format!("runtime_{}", db.name()));
    admin.batch_execute(&format!("create role {owner} login; create role {runtime} login; \
        revoke create on database {} from public; create schema pump; grant usage, create on schema pump to {owner}", db.name())).await.unwrap();
    let applied = migrate(&db.url_as(&owner), "pump").await.unwrap().applied;
    assert!(!applied.is_empty());
    admin.batch_execute(&format!("grant usage on schema pump to {runtime}; \
        grant select, insert, update, delete on all tables in schema pump to {runtime}; grant usage on all sequences in schema pump to {runtime}")).await.unwrap();
    let runner = common::connect(&db.url_as(&runtime)).await;
    assert_eq!(schema_state(&runner, "pump").await.unwrap(), SchemaState::Current);
    assert_eq!(migrate(&db.url_as(&runtime), "pump").await.unwrap().applied.len(), 0);
    let me = "018f0000-0000-7000-8000-000000000002";
    for sql in [
        format!("select pump.record_heartbeat('{me}', 's', 'h', 1)::int::int8"),
        "select count(*) from pump.store_inbox_messages('[{\"message_type\": \"a\", \"payload\": 1, \"stream_id\": \"018f0000-0000-7000-8000-000000000001\"}]')".to_owned(),
        format!("select pump.claim_instance_alive_lock('{me}')::int::int8"),
        "select count(*) from pump.wh_live_instances where alive and lock_held".to_owned(),
        format!("select pump.deregister_instance('{me}')::int::int8"),
    ] {
        assert_eq!(count(&runner, &sql).await, 1, "{sql}");
    }
    drop(runner);
    let error = migrate(&db.url_as(&runtime), "elsewhere").await.unwrap_err();
    assert!(
        error.to_string().contains("create schema \"elsewhere\"") && error.to_string().contains("42501"),
        "{error}"
    );
    admin
        .batch_execute(&format!("drop owned by {owner}, {runtime} cascade; drop role {owner}, {runtime}"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_cancelled_migration_leaves_no_lock_and_no_table() {
    let db = common::empty_database().await;
    let watcher = db.connect().await;
    let quiet = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
    // Cancelled after one poll, two polls, …: at every await, until one goes through.
    let mut cancelled = 0;
    for polls in 1.. {
        let (url, mut left) = (db.url().to_owned(), polls);
        let mut migration = Box::pin(async move { migrate(&url, "public").await });
        let done = std::future::poll_fn(|cx| {
            if left == 0 {
                return std::task::Poll::Ready(None);
            }
            left -= 1;
            migration.as_mut().poll(cx).map(Some)
        })
        .await;
        drop(migration);
        if done.is_some() {
            break;
        }
        cancelled += 1;
        tokio::time::timeout(PATIENCE, async {
            while count(&watcher, quiet).await > 0 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the session of a cancelled migration ends");
        assert_eq!(advisory_locks(&watcher).await, 0, "after {polls} polls");
        // The last await is the goodbye after the commit: all or nothing either way.
        match schema_state(&watcher, "public").await.unwrap() {
            SchemaState::Missing => {}
            SchemaState::Current => break,
            half => panic!("after {polls} polls: {half:?}"),
        }
    }
    assert!(cancelled > 3, "{cancelled}");
    assert_eq!(schema_state(&watcher, "public").await.unwrap(), SchemaState::Current);
}

#[tokio::test]
async fn a_migration_cancelled_while_it_waits_for_the_lock_does_not_take_it_later() {
    let db = common::empty_database().await;
    let holder = db.connect().await;
    holder
        .batch_execute(
            "begin; select pg_advisory_xact_lock(hashtextextended('workpump migrate ' || 'public', 0))",
        )
        .await
        .unwrap();
    let watcher = db.connect().await;
    let waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database())";
    let url = db.url().to_owned();
    let starter = tokio::spawn(async move { migrate(&url, "public").await });
    while count(&watcher, waiting).await == 0 {
        tokio::task::yield_now().await;
    }
    starter.abort();
    assert!(starter.await.unwrap_err().is_cancelled());
    tokio::time::timeout(PATIENCE, async {
        while count(&watcher, waiting).await > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the server notices that the waiting client is gone");
    holder.batch_execute("commit").await.unwrap();
    let second = tokio::time::timeout(PATIENCE, migrate(db.url(), "public")).await;
    assert!(!second.expect("a second start is not held up").unwrap().applied.is_empty());
}
