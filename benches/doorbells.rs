//! What the doorbells cost producers: `cargo bench --bench doorbells [-- SECONDS [ROUNDS]]`.
//!
//! Every producer stores one row a transaction, as fast as it can, on a durable private server. Runs of all ways to ring follow one
//! another within each round, and ratios are taken within a round: the machine is slower in one minute than in the next.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::poll_fn;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, NoTls, Statement};
use uuid::Uuid;
use workpump::embedded::EmbeddedPostgres;
use workpump::{NewOutbox, Producer};

/// Streams that are known, and therefore have an owner.
const STREAMS: u128 = 1_000;
const STREAM: u128 = 0x0190_0000_0000_7000_8000_0000_0000_0000;
/// Transactions of each producer before the clock starts: a session plans its statements first.
const WARM_UP: usize = 10;

/// How a run rings.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bells {
    /// The table has no trigger.
    NoTrigger,
    /// `workpump.skip_doorbells` is on.
    Skipped,
    /// The trigger as it is.
    Armed,
    /// The trigger does nothing but NOTIFY.
    Always,
}

/// Who takes the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Consumer {
    /// A member that never sleeps, and rows that stay.
    None,
    /// Claims, deletes, and looks again after a millisecond of nothing.
    Polling,
    /// Claims, deletes, and sleeps under its arm lock until it is rung.
    Sleeping,
}

const RUNS: [(&str, Bells, Consumer); 6] = [
    ("no trigger", Bells::NoTrigger, Consumer::None),
    ("bells skipped", Bells::Skipped, Consumer::None),
    ("nobody asleep", Bells::Armed, Consumer::None),
    ("always NOTIFY", Bells::Always, Consumer::None),
    ("no trigger, polling consumer", Bells::NoTrigger, Consumer::Polling),
    ("consumer that arms", Bells::Armed, Consumer::Sleeping),
];

/// What each transaction does.
#[derive(Clone, Copy, Debug)]
enum Store {
    /// A prepared INSERT: the least a producer can do.
    Insert,
    /// `store_outbox_messages`, prepared.
    Function,
    /// `Producer::outbox`.
    Library,
}

/// Which stream a row gets.
#[derive(Clone, Copy, Debug)]
enum Streams {
    Known,
    Unordered,
    Fresh,
}

const CASES: [(usize, Store, Streams); 7] = [
    (16, Store::Library, Streams::Known),
    (64, Store::Insert, Streams::Known),
    (64, Store::Function, Streams::Known),
    (64, Store::Library, Streams::Known),
    (64, Store::Insert, Streams::Unordered),
    (64, Store::Library, Streams::Unordered),
    (64, Store::Library, Streams::Fresh),
];

/// What one run came to.
#[derive(Clone, Copy, Default)]
struct Figures {
    commits: f64,
    p50: f64,
    p99: f64,
}

fn payload() -> Value {
    json!({ "number": 1, "note": "x".repeat(150) })
}

struct Session {
    client: Client,
    insert: Statement,
    function: Statement,
    library: Producer,
}

impl Session {
    async fn open(url: &str, bells: Bells) -> Self {
        let client = workpump::connect(url).await.expect("connect");
        if bells == Bells::Skipped {
            client.batch_execute("set workpump.skip_doorbells = on").await.expect("set");
        }
        let insert = client
            .prepare("insert into wh_outbox (message_id, stream_id, message_type, payload) values ($1, $2, 'order', $3)")
            .await
            .expect("prepare");
        let function = client.prepare("select * from store_outbox_messages($1)").await.expect("prepare");
        Self { client, insert, function, library: Producer::new("public").expect("schema") }
    }

    async fn store(&self, store: Store, streams: Streams, nth: usize) {
        let stream = match streams {
            Streams::Known => Some(Uuid::from_u128(STREAM + nth as u128 % STREAMS)),
            Streams::Unordered => None,
            Streams::Fresh => Some(Uuid::now_v7()),
        };
        match store {
            Store::Insert => {
                let id = Uuid::now_v7();
                self.client.execute(&self.insert, &[&id, &stream, &payload()]).await.expect("insert");
            }
            Store::Function => {
                let items = json!([{ "message_type": "order", "payload": payload(), "stream_id": stream }]);
                self.client.query(&self.function, &[&items]).await.expect("store");
            }
            Store::Library => {
                let message = NewOutbox::new("order", &payload());
                let message = stream.into_iter().fold(message, NewOutbox::stream);
                let stored = self.library.outbox(&self.client, &[message]).await.expect("enqueue");
                assert_eq!(stored.new_messages(), 1);
            }
        }
    }
}

/// Claims and deletes until `stop`; sleeps under the arm lock if it is told to.
async fn consume(url: String, me: Uuid, consumer: Consumer, stop: Arc<AtomicBool>) {
    let client = workpump::connect(&url).await.expect("connect");
    let claim = client
        .prepare("select work_id from claim_work($1, 1000, 300, 10000, '{outbox}')")
        .await
        .expect("claim");
    let delete = client.prepare("delete from wh_outbox where message_id = any ($1)").await.expect("delete");
    let take = async || {
        let rows = client.query(&claim, &[&me]).await.expect("claim");
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        if !ids.is_empty() {
            client.execute(&delete, &[&ids]).await.expect("delete");
        }
        !ids.is_empty()
    };
    let rung = Arc::new(Notify::new());
    let _ears = listen(&url, me, &rung).await;
    let key: i64 = client.query_one("select wh_arm_key($1)", &[&me]).await.expect("key").get(0);
    while !stop.load(Ordering::Acquire) {
        if take().await {
            continue;
        }
        if consumer == Consumer::Polling {
            sleep(Duration::from_millis(1)).await;
            continue;
        }
        sleep(Duration::from_millis(2)).await;
        if take().await {
            continue;
        }
        // Waits for producers that were told that nobody sleeps; whoever comes now rings.
        client.batch_execute(&format!("select pg_advisory_lock({key})")).await.expect("arm");
        while !take().await && !stop.load(Ordering::Acquire) {
            let woken = timeout(Duration::from_millis(200), rung.notified()).await.is_ok();
            if woken {
                break;
            }
        }
        client.batch_execute(&format!("select pg_advisory_unlock({key})")).await.expect("disarm");
    }
}

/// A session that listens for one instance.
async fn listen(url: &str, me: Uuid, rung: &Arc<Notify>) -> Client {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    let rung = Arc::clone(rung);
    tokio::spawn(async move {
        let mut messages = poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if matches!(message, AsyncMessage::Notification(_)) {
                rung.notify_one();
            }
        }
    });
    client.batch_execute(&format!("listen \"wh_work_{me}\"")).await.expect("listen");
    client
}

struct Bench {
    server: EmbeddedPostgres,
    me: Uuid,
    length: Duration,
}

impl Bench {
    /// A database for each kind of trigger, each with one member that owns all known streams.
    async fn prepare(&self) {
        workpump::migrate(&self.server.url("postgres"), "public").await.expect("migrate");
        let client = workpump::connect(&self.server.url("postgres")).await.expect("connect");
        client
            .query_typed(
                "select record_heartbeat($1, 'bench', 'here', 1, null, 3600)",
                &[(&self.me, Type::UUID)],
            )
            .await
            .expect("member");
        client
            .execute_typed(
                "insert into wh_active_streams (stream_id, assigned_instance_id, lease_expiry) \
                 select id, $2, clock_timestamp() + interval '1 day' from unnest($1) id",
                &[
                    (
                        &(0..STREAMS).map(|n| Uuid::from_u128(STREAM + n)).collect::<Vec<_>>(),
                        Type::UUID_ARRAY,
                    ),
                    (&self.me, Type::UUID),
                ],
            )
            .await
            .expect("streams");
        client.batch_execute("vacuum analyze").await.expect("analyze");
        drop(client);
        let other = workpump::connect(&self.server.url("template1")).await.expect("connect");
        for bells in [Bells::NoTrigger, Bells::Armed, Bells::Always] {
            let name = database(bells);
            // The last session on the template may not have left yet.
            while other.batch_execute(&format!("create database {name} template postgres")).await.is_err() {
                sleep(Duration::from_millis(20)).await;
            }
        }
        let plain = workpump::connect(&self.server.url(database(Bells::NoTrigger))).await.expect("connect");
        plain.batch_execute("drop trigger wh_work_arrived on wh_outbox").await.expect("drop");
        let loud = workpump::connect(&self.server.url(database(Bells::Always))).await.expect("connect");
        loud.batch_execute(&format!(
            "create or replace function wh_work_arrived() returns trigger language plpgsql as \
             $$ begin perform pg_notify('wh_work_{}', tg_argv[0]); return null; end $$",
            self.me
        ))
        .await
        .expect("replace");
    }

    async fn run(
        &self,
        clients: usize,
        store: Store,
        streams: Streams,
        bells: Bells,
        consumer: Consumer,
    ) -> Figures {
        let url = self.server.url(database(bells));
        let control = workpump::connect(&url).await.expect("connect");
        control
            .batch_execute(
                "truncate wh_outbox; delete from wh_active_streams where assigned_instance_id is null; checkpoint",
            )
            .await
            .expect("clean up");
        let heard = Arc::new(Notify::new());
        let stop = Arc::new(AtomicBool::new(false));
        let work = (consumer != Consumer::None)
            .then(|| tokio::spawn(consume(url.clone(), self.me, consumer, Arc::clone(&stop))));
        let _ears = listen(&url, self.me, &heard).await;
        let sessions = join_all((0..clients).map(|_| Session::open(&url, bells))).await;
        let length = self.length;
        let producers: Vec<JoinHandle<(Vec<u32>, Instant, Instant)>> = sessions
            .into_iter()
            .enumerate()
            .map(|(n, session)| {
                tokio::spawn(async move {
                    for nth in 0..WARM_UP {
                        session.store(store, streams, n * 17 + nth).await;
                    }
                    let started = Instant::now();
                    let mut took = Vec::new();
                    while started.elapsed() < length {
                        let begun = Instant::now();
                        session.store(store, streams, n * 17 + took.len()).await;
                        took.push(begun.elapsed().as_micros() as u32);
                    }
                    (took, started, Instant::now())
                })
            })
            .collect();
        let mut took = Vec::new();
        let mut rate = 0.0;
        for producer in producers {
            let (mine, from, until) = producer.await.expect("producer");
            rate += mine.len() as f64 / (until - from).as_secs_f64();
            took.extend(mine);
        }
        stop.store(true, Ordering::Release);
        if let Some(work) = work {
            work.await.expect("consumer");
        }
        took.sort_unstable();
        let at = |share: f64| f64::from(took[(took.len() as f64 * share) as usize]) / 1_000.0;
        Figures { commits: rate, p50: at(0.5), p99: at(0.99) }
    }
}

fn database(bells: Bells) -> &'static str {
    match bells {
        Bells::NoTrigger => "bench_plain",
        Bells::Skipped | Bells::Armed => "bench_bells",
        Bells::Always => "bench_always",
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn run(seconds: f64, rounds: usize) {
    // Durable, as in production: flushes are part of the price.
    let server = EmbeddedPostgres::builder()
        .setting("fsync", "on")
        .setting("full_page_writes", "on")
        .setting("max_connections", "150")
        .setting("max_wal_size", "4GB")
        .start()
        .expect("server");
    let bench = Bench { server, me: Uuid::now_v7(), length: Duration::from_secs_f64(seconds) };
    bench.prepare().await;
    println!("{rounds} rounds of {seconds} s each; medians; ratios are medians of the ratios of each round");
    for (clients, store, streams) in CASES {
        let mut figures = vec![Vec::new(); RUNS.len()];
        for _ in 0..rounds {
            for (figures, (_, bells, consumer)) in figures.iter_mut().zip(RUNS) {
                figures.push(bench.run(clients, store, streams, bells, consumer).await);
            }
        }
        println!("\n{clients} producers, {store:?}, {streams:?}");
        for (nth, (name, ..)) in RUNS.iter().enumerate() {
            let base = if nth < 4 { 0 } else { 4 };
            let of = |value: fn(&Figures) -> f64| median(figures[nth].iter().map(value).collect());
            let ratio = |value: fn(&Figures) -> f64| {
                median(figures[nth].iter().zip(&figures[base]).map(|(a, b)| value(a) / value(b)).collect())
            };
            println!(
                "  {name:<29} {:>7.0} commits/s  p50 {:>6.2} ms  p99 {:>7.2} ms   commits {:.2}  p99 {:.2}",
                of(|f| f.commits),
                of(|f| f.p50),
                of(|f| f.p99),
                ratio(|f| f.commits),
                ratio(|f| f.p99),
            );
        }
    }
}

fn main() {
    let mut numbers = std::env::args().filter_map(|argument| argument.parse::<f64>().ok());
    let seconds = numbers.next().unwrap_or(3.0);
    let rounds = numbers.next().unwrap_or(3.0) as usize;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("runtime")
        .block_on(run(seconds, rounds));
}
