//! A machine that is busy beyond measure, and handlers that take every connection: slow is not dead.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Bouncer, quick, scale};
use fleet::{Relay, To, declared, evictions, settled, store, until, value};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};
use workpump::{NewOutbox, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

/// One test at a time: the first one leaves nothing of the machine to others.
static ALONE: Mutex<()> = Mutex::const_new(());

fn lasts() -> Duration {
    Duration::from_secs(20) * scale()
}

/// Processes that use every core without a pause.
struct Hogs(Vec<Child>);

impl Hogs {
    fn start() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let hog = |_| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
            command.spawn().expect("a shell")
        };
        Self((0..cores).map(hog).collect())
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.0 {
            drop(hog.kill());
            drop(hog.wait());
        }
    }
}

#[tokio::test]
async fn with_every_core_in_use_nobody_is_taken_for_dead() {
    let _alone = ALONE.lock().await;
    let db = common::database().await;
    let control = db.connect().await;
    let mut relays = Vec::new();
    for _ in 0..3 {
        relays.push(Relay::start(&control, db.url(), To::Nowhere, &[]).await);
    }
    let all: Vec<&Relay> = relays.iter().collect();
    settled(&control, &all).await;
    let hogs = Hogs::start();
    let until_then = Instant::now() + lasts();
    let (mut stored, mut oldest) = (0, 0.0_f64);
    while Instant::now() < until_then {
        store(&control, 100).await;
        stored += 100;
        let age = "select extract(epoch from max(heartbeat_age))::float8 from wh_live_instances";
        oldest = oldest.max(value(&control, age).await);
        assert_eq!(evictions(&control).await, []);
        sleep(Duration::from_millis(100)).await;
    }
    drop(hogs);
    until(&control, "select count(*) = 0 from wh_outbox").await;
    // Whoever is under suspicion now gets its verdict.
    sleep(Duration::from_secs(6)).await;
    declared(&control, &all).await;
    assert_eq!(evictions(&control).await, []);
    println!(
        "every core in use for {:?}: {stored} messages, oldest beat {oldest:.1} s, nobody evicted",
        lasts()
    );
}

/// Handlers that keep a session of the pooler each, inside a transaction, until an instant by the database clock.
struct Greedy {
    url: String,
    until: String,
}

impl Publisher for Greedy {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        let driven = tokio::spawn(connection);
        client.batch_execute(&format!("begin; select pg_sleep_until('{}'); commit", self.until)).await?;
        driven.abort();
        Ok(())
    }
}

#[tokio::test]
async fn with_every_pooled_connection_taken_by_handlers_nobody_is_taken_for_dead() {
    let _alone = ALONE.lock().await;
    let db = common::database().await;
    let control = db.connect().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 4).await else { return };
    let url = bouncer.url(db.name());
    let mut options = quick();
    options.dispatch.max_in_flight = 8;
    let instant = format!("select (clock_timestamp() + interval '{} s')::text", lasts().as_secs());
    let until_then: String = value(&control, &instant).await;
    let mut pumps = Vec::new();
    for _ in 0..2 {
        let greedy = Greedy { url: url.clone(), until: until_then.clone() };
        let pump = WorkPump::builder(&url).direct_url(db.url()).options(options.clone()).publisher(greedy);
        pumps.push(pump.start().await.expect("starts"));
    }
    let locked = "select count(*) = 2 from wh_live_instances where lock_declared and lock_held";
    until(&control, locked).await;
    let messages: Vec<_> = (0..16).map(|n| NewOutbox::new("greedy", &n)).collect();
    let producer = Producer::new("public").expect("a schema name");
    assert_eq!(producer.outbox(&control, &messages).await.expect("stored").new_messages(), messages.len());
    let taken = "select count(*) = 4 from pg_stat_activity where datname = current_database() and query like 'begin; select pg_sleep_until%'";
    until(&control, taken).await;
    let over = format!("select clock_timestamp() > '{until_then}'");
    while !value::<bool>(&control, &over).await {
        assert_eq!(evictions(&control).await, []);
        assert!(value::<bool>(&control, locked).await, "the lock does not go through the pooler");
        sleep(Duration::from_millis(200)).await;
    }
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert_eq!(evictions(&control).await, []);
    for pump in pumps {
        let report = pump.drain().await;
        assert!(report.deregistered && report.unsettled == 0, "{report:?}");
    }
    println!("every pooled connection taken for {:?}: nobody evicted", lasts());
}
