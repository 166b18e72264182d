//! Many pumps behind few server connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Client;
use workpump::{NewOutbox, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

use crate::common::wait::eventually;
use crate::common::{self, Bouncer, quick, scale};

/// Counts what it is given.
#[derive(Clone)]
pub(super) struct Counting(Arc<AtomicU64>);

impl Counting {
    /// One to give away and one to ask.
    pub(super) fn new() -> (Self, Self) {
        let count = Self(Arc::default());
        (count.clone(), count)
    }

    pub(super) fn rows(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Publisher for Counting {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Stores so many rows, each fifth without a stream.
pub(super) async fn store(client: &Client, rows: u128) {
    let message = |n: u128| {
        let message = NewOutbox::new("note", &(n as u64));
        if n.is_multiple_of(5) { message } else { message.stream(uuid::Uuid::from_u128(1 + n % 20)) }
    };
    let messages: Vec<_> = (0..rows).map(message).collect();
    let producer = Producer::new("public").expect("a schema name");
    let stored = producer.outbox(client, &messages).await.expect("stored");
    assert_eq!(stored.new_messages(), messages.len());
}

/// Errors that actors count, but for the gate's: that a pooler answers is one to it.
async fn errors(pumps: &[WorkPump]) -> Vec<String> {
    let mut found = Vec::new();
    for pump in pumps {
        for account in pump.observe().await {
            if account.name != "notify_gate" && account.counter("errors") > 0 {
                found.push(format!("{account:?}"));
            }
        }
    }
    found
}

#[tokio::test]
async fn sixteen_pumps_behind_two_server_connections_relay_every_row_once_and_meet_no_error() {
    let lasts = Duration::from_secs(if scale() < 10 { 15 * u64::from(scale()) } else { 600 });
    let server = common::server_with(&[]);
    let database = server.database().await;
    let control = database.connect_direct().await;
    let bouncer = Bouncer::in_front_of(&server.postgres, 2).await.expect("PgBouncer");
    let url = bouncer.url(database.name());
    let (counting, counted) = Counting::new();
    let mut pumps = Vec::new();
    for _ in 0..16 {
        let builder = WorkPump::builder(&url).options(quick()).publisher(counting.clone());
        pumps.push(builder.start().await.unwrap());
    }
    let producer = common::connect(&url).await;
    let ends = Instant::now() + lasts;
    let mut stored = 0;
    while Instant::now() < ends {
        store(&producer, 100).await;
        stored += 100;
        eventually("the pumps keep up", async || counted.rows() + 2_000 > stored).await;
    }
    eventually("all rows are relayed", async || counted.rows() >= stored).await;
    let backends = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
    let backends: i64 = control.query_typed_one(backends, &[]).await.unwrap().get(0);
    assert_eq!(errors(&pumps).await, Vec::<String>::new());
    futures_util::future::join_all(pumps.iter().map(WorkPump::drain)).await;
    println!("{} rows in {lasts:?} by 16 pumps over {backends} server connections", counted.rows());
    assert_eq!((counted.rows(), backends), (stored, 2));
    let left: i64 = control.query_typed_one("select count(*) from wh_outbox", &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
    let log = server.postgres.data_dir().with_file_name("log");
    let log = std::fs::read_to_string(log).expect("the server's log");
    let complaints: Vec<_> =
        log.lines().filter(|line| line.contains("ERROR:") || line.contains("prepared statement")).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}
