//! The database goes away in the middle of something: every call ends by its deadline, and nothing is done twice for it.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;

use std::process::Command;
use std::time::Duration;

use common::proxy::Proxy;
use common::wait::eventually;
use common::{Database, PrivateServer, quick, scale};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::engine::options::LivenessSourceMode;
use workpump::{Options, OutboxMessage, Outcome, Publisher, WorkPump};

/// Tells the test what was published, after a pause.
struct Tell(Duration, UnboundedSender<(Uuid, u32)>);

impl Publisher for Tell {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        sleep(self.0).await;
        let _ = self.1.send((message.message_id, message.attempts));
        Ok(())
    }
}

async fn start(url: &str, options: Options, pause: Duration) -> (WorkPump, UnboundedReceiver<(Uuid, u32)>) {
    let (told, published) = unbounded_channel();
    let pump = WorkPump::builder(url).options(options).publisher(Tell(pause, told)).start().await;
    (pump.expect("it starts"), published)
}

async fn value<T: tokio_postgres::types::FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

async fn until(client: &Client, sql: &str) {
    eventually(sql, async || value(client, sql).await).await;
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// A pump whose claim was carried out while its answer, and everything else on its connections, got stuck on the way.
async fn answer_lost(
    db: &Database,
    options: Options,
    rows: i64,
) -> (WorkPump, UnboundedReceiver<(Uuid, u32)>, Proxy) {
    let proxy =
        Proxy::to(common::shared().postgres.socket_dir().join(".s.PGSQL.5432")).await.expect("a door");
    let url = format!("postgresql://postgres@{}/{}", proxy.address(), db.name());
    let (pump, published) = start(&url, options, Duration::ZERO).await;
    let (mut holder, control) = (db.connect().await, db.connect().await);
    let held = holder.transaction().await.expect("a transaction");
    let sql = format!(
        "lock table wh_outbox in access exclusive mode; \
         insert into wh_outbox (message_type, payload) select 'n', '1' from generate_series(1, {rows})"
    );
    held.batch_execute(&sql).await.expect("the table is held");
    let blocked = "select count(*) > 0 from pg_stat_activity where datname = current_database() \
                   and wait_event_type = 'Lock' and query like '%claim_work%'";
    until(&control, blocked).await;
    proxy.hold_all();
    held.commit().await.expect("the table is free");
    let leased =
        format!("select count(*) = {rows} from wh_outbox where instance_id is not null and attempts = 1");
    until(&control, &leased).await;
    (pump, published, proxy)
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_is_handed_back_within_its_lease_and_charges_one_attempt() {
    let db = common::database().await;
    let client = db.connect().await;
    let since = Instant::now();
    let (pump, mut published, _proxy) = answer_lost(&db, quick(), 50).await;
    let mut ids = Vec::new();
    for _ in 0..50 {
        let (id, attempts) = published.recv().await.expect("a message");
        assert_eq!(attempts, 1, "the claim that nobody received is refunded");
        ids.push(id);
    }
    let took = since.elapsed();
    println!("the rows of a lost claim were published after {took:.1?}");
    assert!(took < Duration::from_mins(5), "not by the end of the lease: {took:?}");
    until(&client, "select count(*) = 0 from wh_outbox").await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), published.try_recv().ok()), (50, None), "each once");
    assert!(pump.drain().await.deregistered);
}

#[tokio::test]
async fn packets_that_are_dropped_in_mid_claim_hold_up_neither_the_pump_nor_its_drain() {
    let db = common::database().await;
    let mut options = quick();
    options.dispatch.drain_deadline_seconds = 5;
    let (pump, _published, _proxy) = answer_lost(&db, options, 50).await;
    let since = Instant::now();
    let _report = pump.drain().await;
    let took = since.elapsed();
    println!("a drain in the middle of a lost claim took {took:.1?}");
    // Claims, handlers, results and leaving have a limit each: 5, 5, 5 and 10 s, and 2 s for the lock.
    assert!(took < Duration::from_secs(45), "{took:?}");
}

#[tokio::test]
async fn no_row_is_written_more_than_three_times_by_a_restart_through_recovery() {
    let mut server = common::server_with(&[]);
    for round in 0..scale().min(5) {
        let db = server.database().await;
        let control = db.connect().await;
        run(
            &control,
            "create table written (id uuid); \
             create function note() returns trigger language plpgsql as $$ begin \
                 insert into public.written values (new.message_id); return null; end $$; \
             create trigger note after update on wh_outbox for each row execute function note()",
        )
        .await;
        let mut options = quick();
        options.dispatch.max_in_flight = 200;
        let (pump, published) = start(db.url(), options, Duration::from_millis(20)).await;
        run(
            &control,
            "insert into wh_outbox (message_type, payload) select 'n', '1' from generate_series(1, 5000)",
        )
        .await;
        pump.wake();
        // In the middle of it: some are published, some in hand, some free.
        eventually("a third is published", async || published.len() > 1_500).await;
        drop(control);
        if round % 2 == 0 {
            server.postgres.kill_9().expect("killed");
        } else {
            server.postgres.stop_immediately().expect("stopped");
        }
        server.postgres.restart().expect("recovered");
        let control = db.connect().await;
        until(&control, "select count(*) = 0 from wh_outbox").await;
        let most: i64 =
            value(&control, "select max(n) from (select count(*) n from written group by id) x").await;
        println!("round {round}: no row was updated more than {most} times");
        // A claim; at most a release of what nobody held or an expiry, and the claim after it.
        assert!(most <= 3, "{most}");
        pump.drain().await;
    }
}

/// All processes of a server.
fn signal(server: &PrivateServer, name: &str) {
    let pid = server.postgres.pid().expect("it runs");
    let all = format!("kill -{name} {pid} $(ps -o pid= --ppid {pid})");
    assert!(Command::new("/bin/sh").args(["-c", &all]).status().expect("a shell").success(), "{all}");
}

#[tokio::test]
async fn everyone_goes_on_after_the_server_was_frozen_for_longer_than_anybody_may_be_silent() {
    // At scale 10 for twice the 30 s after which a beat is stale; below that for long enough to end every proof of life.
    let frozen = Duration::from_secs(u64::from(6 * scale()).min(65));
    let server = common::server_with(&[]);
    let db = server.database().await;
    let control = db.connect().await;
    let mut pumps = Vec::new();
    for mode in [LivenessSourceMode::AdvisoryLockWhenAvailable, LivenessSourceMode::HeartbeatTableOnly] {
        let mut options = quick();
        options.heartbeat.liveness_source_mode = mode;
        options.heartbeat.interval_seconds = 1;
        options.heartbeat.slow_interval_seconds = 1;
        pumps.push(start(db.url(), options, Duration::from_millis(5)).await);
    }
    let store = "insert into wh_outbox (message_type, payload) select 'n', '1' from generate_series(1, 500)";
    run(&control, store).await;
    until(&control, "select count(*) < 400 from wh_outbox").await;
    signal(&server, "STOP");
    sleep(frozen).await;
    signal(&server, "CONT");
    until(&control, "select count(*) = 0 from wh_outbox").await;
    for (pump, _) in &pumps {
        eventually("it is ready again", async || pump.is_ready()).await;
    }
    run(&control, store).await;
    until(&control, "select count(*) = 0 from wh_outbox").await;
    until(&control, "select count(*) = 2 from wh_service_instances").await;
    for (pump, _) in &pumps {
        assert!(pump.drain().await.deregistered);
    }
}

/// Its beats are stuck behind somebody's lock of its row; everything else goes on.
#[tokio::test]
async fn an_instance_that_cannot_beat_fences_itself_before_its_peers_may_take_its_rows() {
    let db = common::database().await;
    let (client, mut holder) = (db.connect().await, db.connect().await);
    let mut options = quick();
    options.heartbeat.liveness_source_mode = LivenessSourceMode::HeartbeatTableOnly;
    options.heartbeat.interval_seconds = 1;
    let (pump, _published) = start(db.url(), options, Duration::from_mins(10)).await;
    run(&client, "insert into wh_outbox (message_type, payload) values ('n', '1')").await;
    pump.wake();
    until(&client, "select count(*) = 1 from wh_outbox where instance_id is not null").await;
    let held = holder.transaction().await.expect("a transaction");
    held.batch_execute("select 1 from wh_service_instances for no key update")
        .await
        .expect("its row is locked");
    eventually("it is fenced", async || !pump.is_ready()).await;
    let age: f64 = value(
        &client,
        "select extract(epoch from clock_timestamp() - last_heartbeat_at)::float8 from wh_service_instances",
    )
    .await;
    println!("fenced {age:.1} s after the last beat, of 30 s that peers wait");
    assert!(age < 30.0, "{age}");
    let why = pump.not_ready_because().expect("a reason");
    assert!(why.contains("it is fenced"), "{why}");
    held.rollback().await.expect("its row is free");
    eventually("it goes on", async || pump.is_ready()).await;
}
