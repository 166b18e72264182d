//! What is left after many pumps have come and gone: no thread, no descriptor, no connection, no member.
//!
//! A binary of its own with one test: threads and descriptors are counted for the whole process. `WORKPUMP_TEST_SCALE=20` makes the thousand cycles.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::wait::eventually;
use common::{quick, scale};
use tokio_postgres::Client;
use workpump::supervision::{EventKind, Spec};
use workpump::{OutboxMessage, Outcome, Publisher, WorkPump};

/// Publishes nothing, well.
struct Sink;

impl Publisher for Sink {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        Ok(())
    }
}

/// A user's actor.
struct Guest;

impl actix::Actor for Guest {
    type Context = actix::Context<Self>;
}

/// One life of a pump, in which every third time an actor dies.
async fn cycle(url: &str, number: u32) {
    let guest = Spec::new("guest", |_| Guest);
    let pump = WorkPump::builder(url).options(quick()).publisher(Sink).supervise(guest).start().await;
    let pump = pump.expect("starts");
    if number.is_multiple_of(3) {
        let mut events = pump.registry().events();
        let victim = ["claim", "dispatch", "settle", "guest"][number as usize / 3 % 4];
        pump.registry().crash(victim).expect("a child");
        while !matches!(events.recv().await.expect("told").kind, EventKind::Ready) {}
    }
    assert!(pump.drain().await.deregistered);
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("Linux").count()
}

/// The threads of this process by name, for the report of a failure.
fn threads() -> BTreeMap<String, u32> {
    let mut threads = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").expect("Linux").flatten() {
        // One may end while it is looked at.
        if let Ok(name) = std::fs::read_to_string(task.path().join("comm")) {
            *threads.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    threads
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_typed_one(sql, &[]).await.expect("a count").get(0)
}

#[tokio::test]
async fn pumps_that_come_and_go_leave_nothing_behind() {
    let database = common::database().await;
    let client = database.connect().await;
    // The first ones allocate what the process keeps.
    for number in 0..3 {
        cycle(database.url(), number).await;
    }
    let sessions = "select count(*) from pg_stat_activity where datname = current_database()";
    eventually("the sessions of the first are gone", async || count(&client, sessions).await == 1).await;
    // The kernel takes a joined thread off its list a little later.
    let ours = |name: &String| name.starts_with("actix-rt") || name.starts_with("workpump");
    eventually("the threads of the first are gone", async || !threads().keys().any(ours)).await;
    let before = (threads(), entries("/proc/self/fd"));
    let began = tokio::time::Instant::now();
    let cycles = 50 * scale();
    for number in 0..cycles {
        cycle(database.url(), number).await;
    }
    let each = began.elapsed().div_f64(f64::from(cycles));
    eventually("every session is gone", async || count(&client, sessions).await == 1).await;
    // The kernel takes a joined thread off its list a little later.
    let as_before = async || (threads(), entries("/proc/self/fd")) == before;
    eventually("threads and descriptors are as before", as_before).await;
    assert_eq!(count(&client, "select count(*) from wh_service_instances").await, 0);
    println!("{cycles} pumps started and drained, {} ms each; {:?}", each.as_millis(), before);
    assert!(each < Duration::from_mins(1), "a hang");
}
