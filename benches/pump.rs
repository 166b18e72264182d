//! The pump against the raw-SQL ceiling of the same server in the same run: `cargo bench --bench pump [-- ROWS]`.
//!
//! Prints ratios; the absolute figures belong to the machine. The ceiling is two clients that claim 500 rows by one UPDATE and delete
//! them by id, on a table with no more indexes than that takes, and with no handler. The pump runs a handler that decodes its message.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config};
use uuid::Uuid;
use workpump::embedded::EmbeddedPostgres;
use workpump::{
    Context, Failure, Handler, NewInbox, NewOutbox, OutboxMessage, Outcome, Producer, Publisher, WorkPump,
};

const BATCH: usize = 1_000;
const ROUNDS: usize = 3;

#[derive(Serialize, Deserialize)]
struct Order {
    number: u64,
    note: String,
}

fn order(number: u64) -> Order {
    Order { number, note: "x".repeat(150) }
}

/// Counts what was handled and tells when the last one was.
struct Count {
    left: AtomicUsize,
    done: Notify,
}

impl Count {
    fn of(rows: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(rows), done: Notify::new() })
    }

    fn one(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_one();
        }
    }
}

struct Counted(Arc<Count>);

impl Handler<Order> for Counted {
    async fn handle(&self, _: &mut Context<'_>, order: Order) -> Result<(), Failure> {
        std::hint::black_box(order.number);
        self.0.one();
        Ok(())
    }
}

impl Publisher for Counted {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        std::hint::black_box(message.decode::<Order>()?.number);
        self.0.one();
        Ok(())
    }
}

struct Bench {
    url: String,
    client: Client,
    producer: Producer,
    rows: usize,
}

impl Bench {
    async fn fill_inbox(&mut self, streams: u64) {
        for start in (0..self.rows).step_by(BATCH) {
            let batch: Vec<_> = (start..self.rows.min(start + BATCH))
                .map(|n| {
                    let message = NewInbox::new("order", &order(n as u64));
                    if streams == 0 {
                        message
                    } else {
                        message.stream(Uuid::from_u128(1 + n as u128 % u128::from(streams)))
                    }
                })
                .collect();
            let stored = self.producer.inbox(&self.client, &batch).await.expect("enqueue");
            assert_eq!(stored.new_messages(), batch.len());
        }
        self.client.batch_execute("analyze").await.expect("analyze");
    }

    /// Rows a second from the start of the pump's first claim to the last handled row.
    async fn drain(&mut self, streams: u64) -> f64 {
        self.fill_inbox(streams).await;
        let count = Count::of(self.rows);
        let started = Instant::now();
        let pump = WorkPump::builder(&self.url)
            .options(workpump::config::from_env().expect("options"))
            .handler("order", Counted(Arc::clone(&count)))
            .start()
            .await
            .expect("start");
        count.done.notified().await;
        let rate = self.rows as f64 / started.elapsed().as_secs_f64();
        pump.drain().await;
        rate
    }

    /// Rows a second of two clients that do what a pump cannot avoid.
    async fn ceiling(&mut self) -> f64 {
        self.client
            .batch_execute(
                "drop table if exists ceiling; create table ceiling (id uuid primary key, seq bigint generated always as identity, \
                 payload jsonb not null, owner uuid, lease timestamptz); create index on ceiling (lease, seq)",
            )
            .await
            .expect("table");
        self.client
            .execute_typed(
                "insert into ceiling (id, payload) select gen_random_uuid(), jsonb_build_object('number', n, 'note', repeat('x', 150)) \
                 from generate_series(1, $1) n",
                &[(&(self.rows as i64), Type::INT8)],
            )
            .await
            .expect("fill");
        self.client.batch_execute("analyze ceiling").await.expect("analyze");
        let started = Instant::now();
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let url = self.url.clone();
                tokio::spawn(async move { raw_worker(&url).await })
            })
            .collect();
        for worker in workers {
            worker.await.expect("raw worker");
        }
        self.rows as f64 / started.elapsed().as_secs_f64()
    }

    /// Rows a second stored by the producer, and by a plain multi-row insert into a table with the same body.
    async fn enqueue(&mut self) -> (f64, f64) {
        self.client.batch_execute("truncate wh_outbox; drop table if exists plain; create table plain (id uuid primary key, seq bigint generated always as identity, type text, payload jsonb)").await.expect("tables");
        let batches: Vec<Vec<_>> = (0..self.rows / BATCH)
            .map(|b| (0..BATCH).map(|n| NewOutbox::new("order", &order((b * BATCH + n) as u64))).collect())
            .collect();
        let started = Instant::now();
        for batch in &batches {
            let transaction = self.client.transaction().await.expect("begin");
            assert_eq!(
                self.producer.outbox(&transaction, batch).await.expect("enqueue").new_messages(),
                BATCH
            );
            transaction.commit().await.expect("commit");
        }
        let pump = self.rows as f64 / started.elapsed().as_secs_f64();
        let payloads: Vec<serde_json::Value> =
            (0..BATCH).map(|n| serde_json::to_value(order(n as u64)).expect("json")).collect();
        let started = Instant::now();
        for _ in 0..self.rows / BATCH {
            let ids: Vec<Uuid> = (0..BATCH).map(|_| Uuid::now_v7()).collect();
            let transaction = self.client.transaction().await.expect("begin");
            transaction
                .execute_typed(
                    "insert into plain (id, type, payload) select id, 'order', payload from unnest($1, $2) m (id, payload)",
                    &[(&ids, Type::UUID_ARRAY), (&payloads, Type::JSONB_ARRAY)],
                )
                .await
                .expect("insert");
            transaction.commit().await.expect("commit");
        }
        let raw = self.rows as f64 / started.elapsed().as_secs_f64();
        self.client.batch_execute("truncate wh_outbox").await.expect("clean up");
        (pump, raw)
    }
}

async fn raw_worker(url: &str) {
    let client = workpump::connect(url).await.expect("connect");
    let claim = client
        .prepare(
            "update ceiling set owner = gen_random_uuid(), lease = now() + interval '5 minutes' where id = any (array( \
             select id from ceiling where lease is null order by lease, seq limit 500 for update skip locked)) returning id, payload",
        )
        .await
        .expect("prepare");
    let delete = client.prepare("delete from ceiling where id = any ($1)").await.expect("prepare");
    loop {
        let rows = client.query(&claim, &[]).await.expect("claim");
        if rows.is_empty() {
            return;
        }
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        client.execute(&delete, &[&ids]).await.expect("delete");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn run(rows: usize) {
    // Durable, as in production: flushes are part of the price.
    let server = EmbeddedPostgres::builder()
        .setting("fsync", "on")
        .setting("full_page_writes", "on")
        .start()
        .expect("server");
    let url = server.url("postgres");
    workpump::migrate(&url, "public").await.expect("migrate");
    let client = workpump::connect(&url).await.expect("connect");
    Config::from_str(&url).expect("a URL");
    let mut bench = Bench { url, client, producer: Producer::new("public").expect("schema"), rows };
    let mut figures: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        figures[0].push(bench.ceiling().await);
        figures[1].push(bench.drain(0).await);
        figures[2].push(bench.drain(1_000).await);
        let (pump, raw) = bench.enqueue().await;
        figures[3].push(pump);
        figures[4].push(raw);
    }
    let [ceiling, unordered, ordered, enqueue, insert] = figures.map(median);
    println!("{rows} rows, median of {ROUNDS} rounds");
    println!("raw ceiling           {ceiling:>9.0} rows/s");
    println!("drain, unordered      {unordered:>9.0} rows/s   {:.2} of the ceiling", unordered / ceiling);
    println!("drain, 1 000 streams  {ordered:>9.0} rows/s   {:.2} of the ceiling", ordered / ceiling);
    println!(
        "enqueue, 1 000 a call {enqueue:>9.0} rows/s   {:.2} of a plain insert ({insert:.0} rows/s)",
        enqueue / insert
    );
}

fn main() {
    let rows = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(100_000);
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime").block_on(run(rows));
}
