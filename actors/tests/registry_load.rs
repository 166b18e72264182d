//! The registry under load: nothing lost and order kept over hundreds of panics, floods that starve nobody, and crash loops that cost
//! nothing.
#![allow(clippy::print_stdout, reason = "what was measured is worth reading")]

mod real;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use real::{
    Do, HANG, Log, Point, Who, Worker, alone, exit_of, gate, in_real_time, started, tireless_group,
    until_ready, worker,
};
use tokio::time::Instant;
use workpump_actors::registry::{EventKind, Group, Host, Placement, Spec};

/// A message of a sender; every hundredth is poisonous.
#[derive(Message)]
#[rtype(result = "()")]
struct Numbered {
    sender: usize,
    number: u32,
}

impl Numbered {
    fn is_poisonous(number: u32) -> bool {
        number % 100 == 57
    }
}

/// Writes down what it hears.
struct Ledger(Arc<Mutex<[Vec<u32>; 4]>>);

impl Actor for Ledger {
    type Context = Context<Self>;
}

impl Handler<Numbered> for Ledger {
    type Result = ();

    fn handle(&mut self, Numbered { sender, number }: Numbered, _: &mut Self::Context) {
        assert!(!Numbered::is_poisonous(number), "poison");
        self.0.lock().expect("not poisoned: nobody panics with it")[sender].push(number);
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Last;

impl Handler<Last> for Ledger {
    type Result = ();

    fn handle(&mut self, _: Last, _: &mut Self::Context) {}
}

#[test]
fn of_40_000_messages_of_4_threads_only_the_400_poisonous_ones_are_lost_and_each_keeps_its_order() {
    const EACH: u32 = 10_000;
    in_real_time(async {
        let heard: Arc<Mutex<[Vec<u32>; 4]>> = Arc::default();
        let of_actor = Arc::clone(&heard);
        let spec = Spec::new("ledger", move |_| Ledger(Arc::clone(&of_actor)));
        let registry = started(tireless_group().child(spec)).await;
        let addr = registry.addr::<Ledger>().expect("known");
        let senders: Vec<_> = (0..4)
            .map(|sender| {
                let addr = addr.clone();
                std::thread::spawn(move || {
                    for number in 0..EACH {
                        addr.do_send(Numbered { sender, number });
                        if number % 64 == 0 {
                            // Spreads the panics over the time of sending.
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        for sender in senders {
            tokio::task::spawn_blocking(|| sender.join()).await.expect("runs").expect("sends");
        }
        addr.send(Last).await.expect("answers");
        let expected: Vec<u32> = (0..EACH).filter(|number| !Numbered::is_poisonous(*number)).collect();
        for of_sender in heard.lock().expect("whole").iter() {
            assert_eq!(*of_sender, expected);
        }
        let totals = registry.totals();
        assert_eq!((totals.panics, totals.restarts, totals.undelivered), (400, 400, 0));
        registry.shutdown().await;
        assert_eq!(registry.totals().undelivered, 0);
    });
}

/// Keeps its thread busy for a while.
#[derive(Message)]
#[rtype(result = "()")]
struct Spin(Duration, Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Only computes.
    Plain,
    /// Leaves a future with the actor, as most handlers that answer later do.
    Future,
    /// Sends itself another message.
    Notify,
}

struct Flooded;

impl Actor for Flooded {
    type Context = Context<Self>;
}

impl Handler<Spin> for Flooded {
    type Result = ();

    fn handle(&mut self, Spin(time, kind): Spin, ctx: &mut Self::Context) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::hint::spin_loop();
        }
        match kind {
            Kind::Plain => {}
            Kind::Future => {
                ctx.spawn(async {}.into_actor(self));
            }
            Kind::Notify => ctx.notify(Last),
        }
    }
}

impl Handler<Last> for Flooded {
    type Result = ();

    fn handle(&mut self, _: Last, _: &mut Self::Context) {}
}

/// The longest gap between two beats, and when the last one was.
#[derive(Clone)]
struct Beats(Arc<Mutex<(Duration, Instant)>>);

impl Beats {
    fn new() -> Self {
        Self(Arc::new(Mutex::new((Duration::ZERO, Instant::now()))))
    }

    fn forget(&self) {
        *self.0.lock().expect("whole") = (Duration::ZERO, Instant::now());
    }

    fn beat(&self) {
        let mut beats = self.0.lock().expect("whole");
        *beats = (beats.0.max(beats.1.elapsed()), Instant::now());
    }

    /// The gap that has not ended yet counts too: a timer may never have had its turn.
    fn longest(&self) -> Duration {
        let beats = self.0.lock().expect("whole");
        beats.0.max(beats.1.elapsed())
    }
}

/// Beats every 10 ms.
struct Ticker(Beats);

impl Ticker {
    fn spec(beats: &Beats) -> Spec<Self> {
        let beats = beats.clone();
        Spec::new("ticker", move |_| Self(beats.clone()))
    }
}

impl Actor for Ticker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(Duration::from_millis(10), |act, _| act.0.beat());
    }
}

/// The longest gap of the timer beside an actor that is flooded.
async fn gap_under_flood(kind: Kind) -> Duration {
    let beats = Beats::new();
    let group = tireless_group()
        .child(Spec::new("flooded", |_| Flooded).on(Placement::Shared("flood")))
        .child(Ticker::spec(&beats).on(Placement::Shared("flood")));
    let registry = started(group).await;
    let flooded = registry.addr::<Flooded>().expect("known");
    (0..20_000).for_each(|_| flooded.do_send(Spin(Duration::from_micros(35), kind)));
    beats.forget();
    flooded.send(Last).await.expect("answers");
    let longest = beats.longest();
    registry.shutdown().await;
    println!("measured: longest gap of a 10 ms timer under a flood of {kind:?} messages: {longest:?}");
    longest
}

#[test]
fn a_flood_on_one_actor_does_not_delay_the_timer_of_its_neighbour_beyond_50_ms() {
    alone("a_flood_on_one_actor_does_not_delay_the_timer_of_its_neighbour_beyond_50_ms", || {
        in_real_time(async {
            for kind in [Kind::Plain, Kind::Future, Kind::Notify] {
                let mut best = Duration::MAX;
                for _ in 0..40 {
                    best = best.min(gap_under_flood(kind).await);
                    if best < Duration::from_millis(50) {
                        break;
                    }
                }
                assert!(best < Duration::from_millis(50), "{kind:?}: {best:?} at best");
            }
        });
    });
}

#[test]
fn a_blocked_handler_on_another_thread_delays_nobody_on_the_vital_one() {
    in_real_time(async {
        let beats = Beats::new();
        let group = tireless_group()
            .child(Worker::spec("own").on(Placement::Own))
            .child(Worker::spec("shared").on(Placement::Shared("x")))
            .child(Worker::spec("work"))
            .child(Ticker::spec(&beats).on(Placement::Vital));
        let registry = started(group).await;
        let (open, block) = gate();
        let inside = Arc::new(AtomicBool::new(true));
        for name in ["own", "shared", "work"] {
            let (block, inside) = (block.clone(), Arc::clone(&inside));
            worker(&registry, name).do_send(Do::this(move |_, _| {
                block();
                inside.store(false, Ordering::Release);
            }));
        }
        let mut best = Duration::MAX;
        for _ in 0..20 {
            beats.forget();
            // Not a wait for an event: the time over which the gap is measured.
            tokio::time::sleep(Duration::from_millis(300)).await;
            best = best.min(beats.longest());
            if best < Duration::from_millis(50) {
                break;
            }
        }
        assert!(inside.load(Ordering::Acquire), "all three are still blocked");
        assert!(best < Duration::from_millis(50), "{best:?} at best");
        drop(open);
        registry.shutdown().await;
    });
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(10 * ticks)
}

#[test]
fn a_crash_loop_ends_at_its_limit_costs_no_time_and_touches_no_sibling() {
    alone("a_crash_loop_ends_at_its_limit_costs_no_time_and_touches_no_sibling", || {
        in_real_time(async {
            let healthy = Arc::new(AtomicBool::new(true));
            let flag = Arc::clone(&healthy);
            let hook = move |at, _| assert!(at != Point::Started || flag.load(Ordering::Acquire), "no start");
            let mut group = Group::new("test").child(Worker::hooked("it", hook));
            for sibling in ["a", "b", "c", "d", "e"] {
                group = group.child(Worker::spec(sibling));
            }
            let host = Host::own("test-system").await.expect("a host");
            let registry = group.start(host, HANG).await.expect("starts");
            let mut events = registry.events();
            healthy.store(false, Ordering::Release);
            let (wall, cpu) = (Instant::now(), cpu_time());
            worker(&registry, "it").do_send(Do::panic());
            exit_of(&mut events, "it").await;
            assert!(!registry.health().is_ready());
            let gave_up = registry.terminated().await.expect_err("never starts again");
            let (wall, cpu) = (wall.elapsed(), cpu_time().saturating_sub(cpu));
            let share = cpu.as_secs_f64() / wall.as_secs_f64();
            println!("measured: crash loop of {wall:?} with {:.2} % of a processor", 100.0 * share);
            assert_eq!(gave_up.to_string(), "it was given up after 10 restarts: it panicked: no start");
            assert!(share < 0.05, "{cpu:?} of {wall:?}");
            assert_eq!(registry.totals().restarts, 10);
            let siblings =
                registry.children().into_iter().filter(|child| !child.is_group && child.name != "it");
            assert!(siblings.map(|child| (child.restarts, child.generation)).all(|lives| lives == (0, 1)));
            registry.shutdown().await;
        });
    });
}

#[test]
fn a_hundred_actors_that_panic_at_once_all_come_back() {
    in_real_time(async {
        let log = Log::default();
        let places = [Placement::Vital, Placement::Work, Placement::Shared("x"), Placement::Own];
        let names: Vec<String> = (0..100).map(|n| format!("actor {n}")).collect();
        let mut group = tireless_group().in_parallel();
        for (n, name) in names.iter().enumerate() {
            group = group.child(Worker::logged(name, &log).on(places[n % 4]));
        }
        let registry = started(group).await;
        for _ in 0..5 {
            for name in &names {
                worker(&registry, name).do_send(Do::panic());
            }
        }
        for name in &names {
            assert_eq!(worker(&registry, name).send(Who).await.expect("answers").0, 6);
        }
        assert_eq!(registry.totals().panics, 500);
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_during_a_flood_loses_nothing() {
    in_real_time(async {
        let log = Log::default();
        let registry = started(tireless_group().child(Worker::logged("it", &log))).await;
        let (mut events, it) = (registry.events(), worker(&registry, "it"));
        let sender = std::thread::spawn({
            let it = it.clone();
            move || (0..200_000).for_each(|n| it.do_send(real::Note(n)))
        });
        for _ in 0..20 {
            registry.restart("it").await.expect("comes back");
            until_ready(&mut events, "it").await;
        }
        tokio::task::spawn_blocking(|| sender.join()).await.expect("runs").expect("sends");
        it.send(Who).await.expect("answers");
        let notes = real::taken(&log);
        assert!(notes.iter().map(|(_, value)| *value).eq(0..200_000), "{} notes", notes.len());
        assert!(notes.is_sorted(), "no earlier life handles anything after a later one");
        let exits = std::iter::from_fn(|| events.try_recv().ok());
        assert_eq!(exits.filter(|event| matches!(event.kind, EventKind::Exited { .. })).count(), 0);
        registry.shutdown().await;
    });
}
