//! A session of the pooler is everybody's: nothing may stay in it.

use tokio_postgres::Client;
use tokio_postgres::types::FromSqlOwned;

use crate::common::wait::eventually;
use crate::common::{self, Bouncer, quick};
use crate::workers::{Counting, store};
use workpump::WorkPump;

async fn value<T: FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_typed_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

#[tokio::test]
async fn the_databases_of_these_tests_are_behind_a_pooler_that_changes_sessions() {
    let database = common::database().await;
    let (one, two) = (database.connect().await, database.connect().await);
    let pid = "select pg_backend_pid()";
    let first: i32 = value(&one, pid).await;
    two.batch_execute("begin").await.unwrap();
    assert_eq!(value::<i32>(&two, pid).await, first, "a session that is free serves the next one");
    assert_ne!(value::<i32>(&one, pid).await, first, "and nobody else while it is in a transaction");
    two.batch_execute("commit").await.unwrap();
    let named = one.prepare("select 1").await.unwrap();
    two.batch_execute("begin").await.unwrap();
    assert!(one.query(&named, &[]).await.is_err(), "and carries no named statement along");
}

#[tokio::test]
async fn a_pump_leaves_no_statement_no_lock_no_channel_no_table_and_no_setting_behind() {
    let database = common::database().await;
    let control = database.connect_direct().await;
    let bouncer = Bouncer::in_front_of(&common::shared().postgres, 2).await.expect("PgBouncer");
    let url = bouncer.url(database.name());
    let (counting, counted) = Counting::new();
    let pump = WorkPump::builder(&url).options(quick()).publisher(counting).start().await.unwrap();
    for _ in 0..10 {
        store(&control, 50).await;
        pump.wake();
    }
    eventually("all rows are relayed", async || counted.rows() == 500).await;
    let locks = "select count(*) from pg_locks where locktype = 'advisory' \
                 and database = (select oid from pg_database where datname = current_database())";
    pump.drain().await;
    assert_eq!(value::<i64>(&control, locks).await, 0);
    // Two transactions at once see both sessions there are.
    let sessions = [common::connect(&url).await, common::connect(&url).await];
    let mut pids = Vec::new();
    for session in &sessions {
        session.batch_execute("begin").await.unwrap();
        pids.push(value::<i32>(session, "select pg_backend_pid()").await);
        let traces = "select coalesce(string_agg(trace, '; '), '') from \
                    (select statement as trace from pg_prepared_statements union all select statement from pg_cursors where name <> '' \
                     union all select pg_listening_channels()) everything";
        assert_eq!(value::<String>(session, traces).await, "");
        assert!(value::<bool>(session, "select pg_my_temp_schema() = 0").await);
        // What the pooler itself sets for each of its clients.
        let settings = "select coalesce(string_agg(name, ' '), '') from pg_settings where source = 'session' and name not in \
                        ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')";
        assert_eq!(value::<String>(session, settings).await, "");
    }
    assert_ne!(pids[0], pids[1]);
}
