//! How soon a sleeping pump has what is stored for it: `cargo bench --bench wake [-- ROUNDS]`.
//!
//! Beside it, in the same run: the call that stores a row, and the round trip of a raw NOTIFY to a session that listens. Prints ratios; the
//! absolute figures belong to the machine. The pump never polls, so what is measured is the doorbell and nothing else.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::poll_fn;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use tokio_postgres::{AsyncMessage, Client, NoTls};
use uuid::Uuid;
use workpump::embedded::EmbeddedPostgres;
use workpump::{Context, Failure, Handler, NewInbox, Options, Producer, WorkPump};

/// How long the pump is left alone before each measurement: longer than its way into sleep.
const QUIET: Duration = Duration::from_millis(25);
const HOPS: u32 = 10;

#[derive(Serialize, Deserialize)]
struct Step {
    hops_left: u32,
}

/// Tells when it was called, and stores the next hop if there is one.
struct Hopper {
    tell: UnboundedSender<Instant>,
    client: Arc<Client>,
    producer: Producer,
}

impl Handler<Step> for Hopper {
    async fn handle(&self, _: &mut Context<'_>, step: Step) -> Result<(), Failure> {
        let now = Instant::now();
        if step.hops_left == 0 {
            return self.tell.send(now).map_err(|_| Failure::retry("the benchmark is over"));
        }
        let next = message(step.hops_left - 1);
        let _ = self.producer.inbox(&*self.client, &[next]).await?;
        Ok(())
    }
}

fn message(hops_left: u32) -> NewInbox {
    NewInbox::new("step", &Step { hops_left }).stream(Uuid::from_u128(1 + u128::from(hops_left) % 3))
}

/// One series of measurements.
struct Series(Vec<Duration>);

impl Series {
    fn at(&mut self, part: f64) -> Duration {
        self.0.sort_unstable();
        self.0[((self.0.len() - 1) as f64 * part).round() as usize]
    }

    fn line(&mut self, what: &str) -> (Duration, Duration) {
        let (p50, p99) = (self.at(0.5), self.at(0.99));
        println!("{what:<44} p50 {p50:>9.1?}   p99 {p99:>9.1?}");
        (p50, p99)
    }
}

/// A session that listens, and when it heard something.
async fn listener(url: &str) -> (Client, UnboundedReceiver<Instant>) {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    let (send, heard) = unbounded_channel();
    tokio::spawn(async move {
        let mut messages = poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if matches!(message, AsyncMessage::Notification(_)) {
                let _ = send.send(Instant::now());
            }
        }
    });
    client.batch_execute("listen raw").await.expect("listen");
    (client, heard)
}

async fn run(rounds: usize) {
    // Durable, as in production: a flush is part of every call that stores.
    let server = EmbeddedPostgres::builder()
        .setting("fsync", "on")
        .setting("full_page_writes", "on")
        .start()
        .expect("server");
    let url = server.url("postgres");
    workpump::migrate(&url, "public").await.expect("migrate");
    let client = Arc::new(workpump::connect(&url).await.expect("connect"));
    let producer = Producer::new("public").expect("schema");
    let (_listening, mut heard) = listener(&url).await;
    let (tell, mut told) = unbounded_channel();
    let mut options = Options::default();
    options.claim.enable_safety_net_poll = false;
    let hopper = Hopper { tell, client: Arc::clone(&client), producer: producer.clone() };
    let pump = WorkPump::builder(&url).options(options).handler("step", hopper).start().await.expect("start");

    let [mut raw, mut call, mut start, mut after, mut chain] = [const { Series(Vec::new()) }; 5];
    for round in 0..rounds + 10 {
        sleep(QUIET).await;
        let begin = Instant::now();
        client.batch_execute("notify raw").await.expect("notify");
        let rung = heard.recv().await.expect("heard") - begin;
        sleep(QUIET).await;
        let begin = Instant::now();
        let _ = producer.inbox(&*client, &[message(0)]).await.expect("stored");
        let stored = begin.elapsed();
        let started = told.recv().await.expect("handled") - begin;
        // The first ones fill caches.
        if round >= 10 {
            raw.0.push(rung);
            call.0.push(stored);
            start.0.push(started);
            after.0.push(started.saturating_sub(stored));
        }
    }
    for _ in 0..rounds.div_ceil(10) {
        sleep(QUIET).await;
        let begin = Instant::now();
        let _ = producer.inbox(&*client, &[message(HOPS - 1)]).await.expect("stored");
        chain.0.push(told.recv().await.expect("handled") - begin);
    }
    println!("{rounds} rounds");
    let rung = raw.line("raw NOTIFY, call to heard");
    call.line("enqueue call");
    let started = start.line("enqueue call to handler start");
    after.line("end of the enqueue call to handler start");
    chain.line(&format!("chain of {HOPS} hops"));
    let times = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
    println!(
        "enqueue to handler start against a raw NOTIFY: p50 {:.1} times, p99 {:.1} times",
        times(started.0, rung.0),
        times(started.1, rung.1)
    );
    println!("a hop against a raw NOTIFY: {:.1} times", times(chain.at(0.5) / HOPS, rung.0));
    pump.drain().await;
}

fn main() {
    let rounds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(300);
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime").block_on(run(rounds));
}
