//! Settings, room for sessions, clocks, keepalives; the horizon and the notification queue.

use workpump::doctor::Severity::{Error, Note, Ok as Well, Warning};

use super::common;
use super::{assert_healthy, examine, of, only, problems, run};

#[tokio::test]
async fn settings_of_the_database_that_stand_in_the_way_are_found() {
    for (setting, severity) in [
        ("default_transaction_isolation = 'repeatable read'", Error),
        ("default_transaction_read_only = on", Error),
        ("lock_timeout = '10ms'", Warning),
        ("idle_session_timeout = '20s'", Warning),
        ("synchronous_commit = off", Note),
    ] {
        let db = common::database().await;
        run(&db.connect().await, &format!("alter database {} set {setting}", db.name())).await;
        let diagnosis = examine(db.url()).await;
        let name = setting.split(' ').next();
        let found = only(&diagnosis, "server.settings", severity);
        assert_eq!(found.subject.as_deref(), name);
        assert!(problems(&diagnosis).iter().all(|check| *check == "server.settings"), "{setting}");
    }
}

#[tokio::test]
async fn a_limit_for_statements_counts_behind_a_pooler_only() {
    let db = common::database().await;
    run(&db.connect().await, &format!("alter database {} set statement_timeout = '5s'", db.name())).await;
    assert_healthy(&examine(db.url()).await);
    let Some(bouncer) = common::Bouncer::in_front_of(&common::shared().postgres, 4).await else { return };
    let diagnosis =
        workpump::doctor(&bouncer.url(db.name()), Some(db.url()), "public").await.expect("a diagnosis");
    let found = only(&diagnosis, "server.settings", Warning);
    assert!(found.seen.contains("statement_timeout = 5000"), "{found:?}");
}

#[tokio::test]
async fn too_few_sessions_for_one_more_instance_are_a_warning() {
    let db = common::database().await;
    run(&db.connect().await, "create role narrow login superuser connection limit 8").await;
    let diagnosis = examine(&db.url_as("narrow")).await;
    let room = only(&diagnosis, "server.sessions", Warning);
    assert!(room.seen.contains("of 8 sessions are free (CONNECTION LIMIT of the role)"), "{room:?}");
}

#[tokio::test]
async fn clocks_of_one_machine_agree() {
    let db = common::database().await;
    let diagnosis = examine(db.url()).await;
    assert!(only(&diagnosis, "server.clock", Well).seen.contains("the server's clock is"));
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn over_tcp_the_limits_in_force_are_shown() {
    // An address of this process alone, so that no port can be taken.
    let pid = std::process::id();
    let address = format!("127.{}.{}.{}", 1 + (pid >> 16) % 250, (pid >> 8) & 255, 1 + pid % 250);
    let server = common::server_with(&[("listen_addresses", &address)]);
    let db = server.database().await;
    let diagnosis = examine(&format!("postgresql://postgres@{address}:5432/{}", db.name())).await;
    let seen = &only(&diagnosis, "server.keepalives", Well).seen;
    assert!(seen.contains("tcp_keepalives_idle 5") && seen.contains("tcp_user_timeout 10000"), "{seen}");
    assert_healthy(&diagnosis);
}

#[tokio::test]
async fn a_session_that_pins_the_horizon_is_named_without_its_query() {
    // Transactions are counted by the server: one of one's own.
    let server = common::server_with(&[]);
    let db = server.database().await;
    let (holder, other) = (db.connect().await, db.connect().await);
    run(&holder, "set application_name = 'sleeper'; begin isolation level repeatable read; select 'a secret of a user'").await;
    let pid: i32 = holder.query_one("select pg_backend_pid()", &[]).await.expect("its process").get(0);
    // So many transactions that it is too many, however little time has passed.
    run(&other, "set synchronous_commit = off").await;
    run(&other, "do $$ begin for n in 1..100100 loop perform pg_current_xact_id(); commit; end loop; end $$")
        .await;
    let diagnosis = examine(db.url()).await;
    let horizon = only(&diagnosis, "activity.horizon", Warning);
    assert!(horizon.seen.contains(&pid.to_string()) && horizon.seen.contains("sleeper"), "{horizon:?}");
    assert!(horizon.seen.contains("idle in transaction") && !horizon.seen.contains("secret"), "{horizon:?}");
    assert!(
        horizon
            .next_step
            .as_deref()
            .is_some_and(|step| step.contains(&format!("pg_terminate_backend({pid})")))
    );
    run(&holder, "rollback").await;
    assert_healthy(&examine(db.url()).await);
}

#[tokio::test]
async fn a_forgotten_prepared_transaction_is_named() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "begin; insert into wh_outbox (message_type, payload, processed_at) values ('a', '{}', now()); prepare transaction 'for''gotten'")
        .await;
    let diagnosis = examine(db.url()).await;
    let horizon = only(&diagnosis, "activity.horizon", Well);
    assert!(horizon.seen.contains("prepared transaction for'gotten (owner postgres"), "{horizon:?}");
    run(&client, "rollback prepared 'for''gotten'").await;
}

#[tokio::test]
async fn the_listener_that_may_hold_the_queue_back_is_named() {
    // The queue is the server's, and so is the oldest transaction: a server of one's own.
    let server = common::server_with(&[]);
    let db = server.database().await;
    let listener = db.connect().await;
    run(&listener, "set application_name = 'deaf'; listen anything; begin; select 1").await;
    let diagnosis = examine(db.url()).await;
    let queue = only(&diagnosis, "activity.notification_queue", Well);
    assert!(
        queue.seen.contains("0.0 % full") && queue.seen.contains("application deaf, idle in transaction"),
        "{queue:?}"
    );
}

#[tokio::test]
async fn autovacuum_that_is_switched_off_for_a_table_is_found() {
    let db = common::database().await;
    run(&db.connect().await, "alter table wh_outbox set (autovacuum_enabled = off, fillfactor = 70)").await;
    let diagnosis = examine(db.url()).await;
    assert_eq!(only(&diagnosis, "activity.autovacuum", Warning).subject.as_deref(), Some("wh_outbox"));
    assert!(of(&diagnosis, "activity.dead_rows").is_empty());
}
