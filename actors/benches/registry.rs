//! The supervised registry against a plain actix actor: `cargo bench -p workpump-actors --bench registry`.
//!
//! Prints ratios; the absolute figures belong to the machine. Each pair is measured in turns, round after round, and the median of the
//! rounds counts, so that whatever else runs on the machine meets both.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use tokio::time::Instant;
use workpump_actors::registry::{Backoff, Group, Host, Intensity, Placement, Registry, Spec};

const PANICS: usize = 2_000;
const ROUNDS: usize = 15;
const MESSAGES: usize = 200_000;
const ROUND_TRIPS: usize = 2_000;
const FLOOD: usize = 200_000;

const DEADLINE: Duration = Duration::from_mins(1);

#[derive(Default)]
struct Adder(u64);

impl Actor for Adder {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(64);
    }
}

#[derive(Message)]
#[rtype(result = "u64")]
struct Add(u64);

impl Handler<Add> for Adder {
    type Result = u64;

    fn handle(&mut self, Add(value): Add, _: &mut Self::Context) -> u64 {
        self.0 = self.0.wrapping_add(value);
        self.0
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Panic;

impl Handler<Panic> for Adder {
    type Result = ();

    fn handle(&mut self, _: Panic, _: &mut Self::Context) {
        panic!("told to");
    }
}

/// Keeps its thread busy for a while.
#[derive(Message)]
#[rtype(result = "()")]
struct Spin(Duration);

impl Handler<Spin> for Adder {
    type Result = ();

    fn handle(&mut self, Spin(time): Spin, _: &mut Self::Context) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::hint::spin_loop();
        }
    }
}

/// Keeps its thread until the sender is dropped.
#[derive(Message)]
#[rtype(result = "()")]
struct Hold(std::sync::mpsc::Receiver<()>);

impl Handler<Hold> for Adder {
    type Result = ();

    fn handle(&mut self, Hold(held): Hold, _: &mut Self::Context) {
        // It only ever fails, when the sender is gone.
        let _ = held.recv();
    }
}

/// Notes the gaps between its beats of 10 ms.
struct Ticker(Arc<Mutex<Vec<Duration>>>, Instant);

impl Actor for Ticker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(Duration::from_millis(10), |act, _| {
            if let Ok(mut gaps) = act.0.lock() {
                gaps.push(act.1.elapsed());
            }
            act.1 = Instant::now();
        });
    }
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Panics without a word: the hook of this program would print each.
fn be_quiet() {
    std::panic::set_hook(Box::new(|_| ()));
}

async fn tree(children: impl FnOnce(Group) -> Group) -> Registry {
    let intensity = Intensity { max_restarts: 10_000_000, ..Intensity::default() };
    let backoff = Backoff { first: Duration::ZERO, ..Backoff::default() };
    let group = children(Group::new("bench").intensity(intensity).backoff(backoff));
    let host = Host::own("bench").await.expect("a host");
    group.start(host, DEADLINE).await.expect("starts")
}

/// From a panicking message to the answer of the next.
async fn panic_to_answer() {
    let registry = tree(|group| group.child(Spec::new("adder", |_| Adder::default()))).await;
    let addr = registry.addr::<Adder>().expect("known");
    let mut times = Vec::with_capacity(PANICS);
    for _ in 0..PANICS {
        let begun = Instant::now();
        addr.do_send(Panic);
        addr.send(Add(1)).await.expect("answers");
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    let (half, most) = (percentile(&times, 50), percentile(&times, 99));
    println!("panic to the next answer    p50 {half:>9.1?}   p99 {most:>9.1?}   ({PANICS} panics)");
    registry.shutdown().await;
}

/// Messages a second: sent without an answer, the last one with.
async fn throughput(addr: &Addr<Adder>) -> f64 {
    let begun = Instant::now();
    for value in 0..MESSAGES {
        addr.do_send(Add(value as u64));
    }
    addr.send(Add(0)).await.expect("answers");
    MESSAGES as f64 / begun.elapsed().as_secs_f64()
}

/// The same with all messages in the queue before the actor looks at it: what the actor's side alone can do.
async fn drain(addr: &Addr<Adder>) -> f64 {
    let (release, held) = std::sync::mpsc::channel();
    addr.do_send(Hold(held));
    for value in 0..MESSAGES {
        addr.do_send(Add(value as u64));
    }
    let answer = addr.send(Add(0));
    let begun = Instant::now();
    drop(release);
    answer.await.expect("answers");
    MESSAGES as f64 / begun.elapsed().as_secs_f64()
}

/// The median round trip from another thread, in microseconds.
async fn round_trip(addr: &Addr<Adder>) -> f64 {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        addr.send(Add(1)).await.expect("answers");
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    percentile(&times, 50).as_secs_f64() * 1e6
}

/// Measures both in turns, and prints what each does and the median of the ratios.
async fn compare(
    what: &str,
    unit: &str,
    addrs: (&Addr<Adder>, &Addr<Adder>),
    measure: impl AsyncFn(&Addr<Adder>) -> f64,
) -> f64 {
    let (mut supervised, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let (first, second) = if round % 2 == 0 { addrs } else { (addrs.1, addrs.0) };
        let (one, other) = (measure(first).await, measure(second).await);
        let (ours, theirs) = if round % 2 == 0 { (one, other) } else { (other, one) };
        supervised.push(ours);
        plain.push(theirs);
        ratios.push(ours / theirs);
    }
    let ratio = median(ratios);
    let (ours, theirs) = (median(supervised), median(plain));
    println!("{what:<27} supervised {ours:>10.1} {unit}   plain {theirs:>10.1} {unit}   ratio {ratio:.2}");
    ratio
}

async fn overhead() {
    let registry =
        tree(|group| group.child(Spec::new("adder", |_| Adder::default()).on(Placement::Own))).await;
    let supervised = registry.addr::<Adder>().expect("known");
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let arbiter = Arbiter::new();
    arbiter.spawn_fn(move || drop(sender.send(Adder::default().start())));
    let plain = receiver.await.expect("started");
    let pair = (&supervised, &plain);
    let throughput = compare("do_send, then one answer", "msg/s", pair, throughput).await;
    let drained = compare("the same, queued before", "msg/s", pair, drain).await;
    let round_trip = compare("round trip p50", "µs", pair, round_trip).await;
    let worst = (1.0 / throughput).max(1.0 / drained).max(round_trip);
    println!("overhead at most            {worst:.2} × a plain actor");
    arbiter.stop();
    registry.shutdown().await;
}

type Gaps = Arc<Mutex<Vec<Duration>>>;

fn ticker(name: &str, gaps: &Gaps) -> Spec<Ticker> {
    let gaps = Arc::clone(gaps);
    Spec::new(name, move |_| Ticker(Arc::clone(&gaps), Instant::now()))
}

/// The timer of a flooded actor's neighbour, and one on a thread of its own, which shows what the machine itself does.
async fn gap_under_flood() {
    let (beside, alone) = (Gaps::default(), Gaps::default());
    let registry = tree(|group| {
        let flooded = group.child(Spec::new("adder", |_| Adder::default()));
        flooded.child(ticker("beside", &beside)).child(ticker("alone", &alone).on(Placement::Own))
    })
    .await;
    let addr = registry.addr::<Adder>().expect("known");
    for _ in 0..FLOOD {
        addr.do_send(Spin(Duration::from_micros(20)));
    }
    addr.send(Add(0)).await.expect("answers");
    registry.shutdown().await;
    for (which, gaps) in [("beside a flood", beside), ("alone on its thread", alone)] {
        let mut gaps = std::mem::take(&mut *gaps.lock().expect("whole"));
        gaps.sort_unstable();
        let (half, most, longest) = (percentile(&gaps, 50), percentile(&gaps, 99), percentile(&gaps, 100));
        println!("10 ms timer {which:<20} p50 {half:>8.1?}   p99 {most:>8.1?}   longest {longest:.1?}");
    }
    println!("                            ({FLOOD} messages of 20 µs)");
}

fn main() {
    be_quiet();
    System::new().block_on(async {
        panic_to_answer().await;
        overhead().await;
        gap_under_flood().await;
    });
}
