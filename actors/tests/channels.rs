//! Channels of NOTIFY that users hear: many subscribers on one session, each told when it may have missed something.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc;
use tokio::time::sleep;
use workpump_actors::message::{Heard, Subscribe, SubscribeError, Unsubscribe};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{DirectOp, FakeDirect, GateRig, Reply, TestProbe, in_virtual_time, quiesce};

fn listening(channel: &str) -> Heard {
    Heard::Listening { channel: channel.into() }
}

fn rung(channel: &str, payload: &str) -> Heard {
    Heard::Rung { channel: channel.into(), payload: payload.into() }
}

fn lost() -> Reply {
    Reply::Fail(StoreError::Unavailable("no answer".to_owned()))
}

async fn gate() -> GateRig {
    let rig = GateRig::start(&Options::default(), &FakeDirect::new());
    quiesce().await;
    rig
}

async fn subscribe(rig: &GateRig, channel: &str, to: &TestProbe<Heard>) {
    let asked = rig.addr.send(Subscribe { channel: channel.into(), to: to.recipient() }).await;
    asked.expect("alive").expect("a good name");
    quiesce().await;
}

async fn unsubscribe(rig: &GateRig, channel: &str, to: &TestProbe<Heard>) {
    rig.addr.send(Unsubscribe { channel: channel.into(), to: to.recipient() }).await.expect("alive");
    quiesce().await;
}

/// How often a channel was listened to, and given up.
fn issued(server: &FakeDirect, channel: &str) -> (usize, usize) {
    let count = |op| server.asked(op).iter().flatten().filter(|name| *name == channel).count();
    (count(DirectOp::Listen), count(DirectOp::Unlisten))
}

#[test]
fn a_subscriber_is_told_that_its_channel_is_listened_to_and_then_hears_it() {
    in_virtual_time(async {
        let rig = gate().await;
        let mut a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        assert_eq!(a.take(), [listening("a")]);
        assert!(rig.server.ring("a", "1") && rig.server.ring("a", ""));
        quiesce().await;
        assert_eq!(a.take(), [rung("a", "1"), rung("a", "")]);
        assert_eq!(issued(&rig.server, "a"), (1, 0));
    });
}

#[test]
fn the_first_of_a_channel_listens_the_last_one_gives_it_up_and_the_others_cost_nothing() {
    in_virtual_time(async {
        let rig = gate().await;
        let (mut a, mut b) = (TestProbe::start(), TestProbe::start());
        subscribe(&rig, "a", &a).await;
        subscribe(&rig, "a", &b).await;
        assert_eq!((a.take(), b.take()), (vec![listening("a")], vec![listening("a")]));
        unsubscribe(&rig, "a", &a).await;
        unsubscribe(&rig, "a", &a).await;
        assert_eq!(issued(&rig.server, "a"), (1, 0), "somebody is left");
        rig.server.ring("a", "1");
        quiesce().await;
        assert_eq!((a.take(), b.take()), (vec![], vec![rung("a", "1")]));
        unsubscribe(&rig, "a", &b).await;
        assert_eq!(issued(&rig.server, "a"), (1, 1));
        assert!(!rig.server.ring("a", "2"));
        unsubscribe(&rig, "never heard of", &b).await;
        assert_eq!(rig.server.count(DirectOp::Unlisten), 1);
    });
}

#[test]
fn asking_twice_is_asking_once_but_for_being_told_again() {
    in_virtual_time(async {
        let rig = gate().await;
        let mut a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        subscribe(&rig, "a", &a).await;
        assert_eq!(a.take(), [listening("a"), listening("a")], "an actor that was made again has to look");
        rig.server.ring("a", "1");
        quiesce().await;
        assert_eq!(a.take(), [rung("a", "1")]);
        assert_eq!(issued(&rig.server, "a"), (1, 0));
        assert_eq!(rig.account().await.counter("subscriptions"), 1);
    });
}

#[test]
fn a_hundred_that_come_and_go_at_once_are_one_listen_and_one_unlisten() {
    in_virtual_time(async {
        let rig = gate().await;
        let mut all: Vec<_> = (0..100).map(|_| TestProbe::start()).collect();
        rig.server.script(DirectOp::Listen, Reply::Slow(Duration::from_millis(5)));
        for one in &all {
            rig.addr.do_send(Subscribe { channel: "a".into(), to: one.recipient() });
        }
        sleep(Duration::from_millis(10)).await;
        assert_eq!(issued(&rig.server, "a"), (1, 0));
        assert!(all.iter_mut().all(|one| one.take() == [listening("a")]));
        rig.server.script(DirectOp::Unlisten, Reply::Slow(Duration::from_millis(5)));
        for one in &all {
            rig.addr.do_send(Unsubscribe { channel: "a".into(), to: one.recipient() });
        }
        sleep(Duration::from_millis(10)).await;
        assert_eq!(issued(&rig.server, "a"), (1, 1));
    });
}

#[test]
fn whatever_subscribers_do_the_session_ends_up_with_what_is_wanted_and_no_statement_is_repeated() {
    in_virtual_time(async {
        for seed in 0..40 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let rig = gate().await;
            let all: Vec<_> = (0..5).map(|_| TestProbe::<Heard>::start()).collect();
            let mut wanted: BTreeSet<(usize, usize)> = BTreeSet::new();
            for _ in 0..100 {
                let (channel, who) = (rng.random_range(0..4), rng.random_range(0..5));
                let (name, to): (Arc<str>, _) = (format!("c{channel}").into(), all[who].recipient());
                if rng.random() {
                    wanted.insert((channel, who));
                    rig.addr.do_send(Subscribe { channel: name, to });
                } else {
                    wanted.remove(&(channel, who));
                    rig.addr.do_send(Unsubscribe { channel: name, to });
                }
                let op = if rng.random() { DirectOp::Listen } else { DirectOp::Unlisten };
                if rng.random_bool(0.3) {
                    rig.server.script(op, Reply::Slow(Duration::from_millis(rng.random_range(1..30))));
                }
                sleep(Duration::from_millis(rng.random_range(0..10))).await;
            }
            sleep(Duration::from_millis(500)).await;
            let names: BTreeSet<String> = wanted.iter().map(|(channel, _)| format!("c{channel}")).collect();
            let mut heard: BTreeSet<String> = rig.server.channels().into_iter().collect();
            assert!(heard.remove(&FakeDirect::channel_of(rig.instance)));
            assert_eq!(heard, names, "seed {seed}");
            for channel in 0..4 {
                let name = format!("c{channel}");
                let (listens, unlistens) = issued(&rig.server, &name);
                assert_eq!(listens, unlistens + usize::from(names.contains(&name)), "seed {seed}, {name}");
            }
        }
    });
}

#[test]
fn subscriptions_outlive_the_session_and_the_actor_and_are_told_each_time() {
    in_virtual_time(async {
        let mut rig = gate().await;
        let (mut a, mut b) = (TestProbe::start(), TestProbe::start());
        subscribe(&rig, "a", &a).await;
        subscribe(&rig, "b", &b).await;
        a.take();
        b.take();
        rig.server.end_session();
        sleep(Duration::from_secs(2)).await;
        assert_eq!((a.take(), b.take()), (vec![listening("a")], vec![listening("b")]));
        assert_eq!(rig.server.asked(DirectOp::Listen).last(), Some(&vec!["a".to_owned(), "b".to_owned()]));
        rig.restart().await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!((a.take(), b.take()), (vec![listening("a")], vec![listening("b")]));
        rig.server.ring("b", "1");
        quiesce().await;
        assert_eq!((a.take(), b.take()), (vec![], vec![rung("b", "1")]));
    });
}

#[test]
fn a_ring_that_overtakes_the_answer_to_its_listen_is_not_heard_before_the_subscriber_was_told_to_look() {
    in_virtual_time(async {
        let mut rig = gate().await;
        let mut a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        a.take();
        for restarts in [false, true] {
            // The work channel's first, then that of the subscriber, which is listened to before anybody knows.
            rig.server.script(DirectOp::Listen, Reply::Late(Duration::from_millis(1)));
            rig.server.script(DirectOp::Listen, Reply::Late(Duration::from_millis(5)));
            if restarts {
                rig.restart().await;
            } else {
                rig.server.end_session();
            }
            while !rig.server.ring("a", "1") {
                sleep(Duration::from_millis(1)).await;
            }
            quiesce().await;
            assert!(a.take().is_empty(), "whatever was missed before comes first");
            sleep(Duration::from_millis(10)).await;
            rig.server.ring("a", "2");
            quiesce().await;
            assert_eq!(a.take(), [listening("a"), rung("a", "2")]);
        }
    });
}

#[test]
fn who_subscribes_before_there_is_a_session_is_told_once_there_is_one() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.script(DirectOp::Connect, Reply::Slow(Duration::from_secs(2)));
        let rig = GateRig::start(&Options::default(), &server);
        let mut a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        assert!(a.take().is_empty());
        sleep(Duration::from_secs(3)).await;
        assert_eq!(a.take(), [listening("a")]);
        assert_eq!(issued(&server, "a"), (1, 0));
    });
}

#[test]
fn names_that_cannot_be_heard_are_refused_and_named() {
    in_virtual_time(async {
        let rig = gate().await;
        let a = TestProbe::<Heard>::start();
        let ask = async |channel: &str| {
            let asked = rig.addr.send(Subscribe { channel: channel.into(), to: a.recipient() }).await;
            asked.expect("alive")
        };
        let long: Arc<str> = "x".repeat(64).into();
        assert_eq!(ask(&long).await, Err(SubscribeError::TooLong { channel: Arc::clone(&long) }));
        assert_eq!(ask("a\0b").await, Err(SubscribeError::Nul { channel: "a\0b".into() }));
        assert_eq!(ask("").await, Err(SubscribeError::Empty));
        assert_eq!(ask(&"x".repeat(63)).await, Ok(()));
        assert!(ask(&long).await.unwrap_err().to_string().contains("64 bytes"));
        quiesce().await;
        assert_eq!(rig.server.asked(DirectOp::Listen).len(), 2);
    });
}

#[test]
fn a_channel_that_is_refused_holds_up_no_other_and_is_tried_again() {
    in_virtual_time(async {
        let rig = gate().await;
        rig.server.set_refused("bad", true);
        let (mut good, mut bad) = (TestProbe::start(), TestProbe::start());
        rig.server.script(DirectOp::Listen, Reply::Slow(Duration::from_millis(1)));
        subscribe(&rig, "first", &good).await;
        subscribe(&rig, "bad", &bad).await;
        subscribe(&rig, "good", &good).await;
        sleep(Duration::from_millis(10)).await;
        assert_eq!(good.take(), [listening("first"), listening("good")]);
        sleep(Duration::from_secs(10)).await;
        let (tries, _) = issued(&rig.server, "bad");
        assert!((10..=13).contains(&tries), "about once a second: {tries}");
        assert!(bad.take().is_empty());
        assert_eq!(issued(&rig.server, "good").0, 2, "with the bad one, and by itself");
        rig.server.set_refused("bad", false);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bad.take(), [listening("bad")]);
        assert_eq!(rig.server.sessions(), 1);
    });
}

#[test]
fn an_unlisten_that_failed_is_tried_again_and_a_new_subscriber_in_between_is_listened_for_anew() {
    in_virtual_time(async {
        let rig = gate().await;
        let mut a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        rig.server.script(DirectOp::Unlisten, lost());
        unsubscribe(&rig, "a", &a).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(issued(&rig.server, "a"), (1, 2));
        subscribe(&rig, "a", &a).await;
        rig.server.script(DirectOp::Unlisten, lost());
        unsubscribe(&rig, "a", &a).await;
        a.take();
        subscribe(&rig, "a", &a).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(a.take(), [listening("a")]);
        assert_eq!(issued(&rig.server, "a"), (3, 3));
        assert!(rig.server.ring("a", "1"));
    });
}

#[test]
fn whoever_has_ended_is_forgotten_and_its_channel_given_up() {
    in_virtual_time(async {
        let rig = gate().await;
        let (mut a, b) = (TestProbe::start(), Sleeper::start());
        rig.addr.do_send(Subscribe { channel: "b".into(), to: b.addr.clone().recipient() });
        quiesce().await;
        b.end().await;
        subscribe(&rig, "a", &a).await;
        assert_eq!(issued(&rig.server, "b"), (1, 1));
        assert_eq!(a.take(), [listening("a")]);
        assert_eq!(rig.account().await.counter("subscriptions"), 1);
    });
}

/// Hears, and sleeps for as long as it is told to.
struct Sleeper {
    addr: Addr<SleepingActor>,
    heard: mpsc::UnboundedReceiver<Heard>,
}

struct SleepingActor(mpsc::UnboundedSender<Heard>);

#[derive(Message)]
#[rtype(result = "()")]
struct Sleep(Duration);

#[derive(Message)]
#[rtype(result = "()")]
struct End;

impl Actor for SleepingActor {
    type Context = Context<Self>;
}

impl Handler<Heard> for SleepingActor {
    type Result = ();

    fn handle(&mut self, heard: Heard, _: &mut Self::Context) {
        let _ = self.0.send(heard);
    }
}

impl Handler<Sleep> for SleepingActor {
    type Result = ();

    fn handle(&mut self, Sleep(time): Sleep, ctx: &mut Self::Context) {
        ctx.wait(sleep(time).into_actor(self));
    }
}

impl Handler<End> for SleepingActor {
    type Result = ();

    fn handle(&mut self, _: End, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Sleeper {
    fn start() -> Self {
        let (sender, heard) = mpsc::unbounded_channel();
        Self { addr: SleepingActor(sender).start(), heard }
    }

    fn take(&mut self) -> Vec<Heard> {
        std::iter::from_fn(|| self.heard.try_recv().ok()).collect()
    }

    async fn end(self) {
        self.addr.send(End).await.expect("alive");
        while self.addr.connected() {
            tokio::task::yield_now().await;
        }
    }
}

#[test]
fn a_full_mailbox_costs_its_owner_rings_and_nobody_else_and_it_is_told_to_look() {
    in_virtual_time(async {
        let rig = gate().await;
        let (mut awake, mut asleep) = (TestProbe::start(), Sleeper::start());
        subscribe(&rig, "a", &awake).await;
        rig.addr.do_send(Subscribe { channel: "a".into(), to: asleep.addr.clone().recipient() });
        quiesce().await;
        awake.take();
        asleep.take();
        asleep.addr.do_send(Sleep(Duration::from_secs(5)));
        quiesce().await;
        for n in 0..1_000 {
            rig.server.ring("a", &n.to_string());
            if n % 10 == 0 {
                quiesce().await;
            }
        }
        quiesce().await;
        assert_eq!(awake.take().len(), 1_000);
        let refused = rig.account().await.counter("refused_full_mailbox");
        assert!((900..1_000).contains(&refused), "the mailbox is bounded: {refused}");
        sleep(Duration::from_secs(6)).await;
        let heard = asleep.take();
        assert_eq!(heard.len() as u64, 1_000 - refused + 1);
        assert_eq!(heard.last(), Some(&listening("a")), "what it missed is behind the last ring it heard");
        rig.server.ring("a", "next");
        quiesce().await;
        assert_eq!(asleep.take(), [rung("a", "next")]);
    });
}

#[test]
fn a_flood_on_a_users_channel_keeps_no_doorbell_waiting() {
    in_virtual_time(async {
        let mut rig = gate().await;
        let a = TestProbe::start();
        subscribe(&rig, "a", &a).await;
        rig.wake.take();
        for n in 0..50_000 {
            rig.server.ring("a", "x");
            if n == 40_000 {
                rig.server.ring(&FakeDirect::channel_of(rig.instance), "outbox");
            }
        }
        rig.wake.expect_within(Duration::from_millis(1)).await;
        assert_eq!(rig.account().await.counter("rings"), 1);
    });
}

#[test]
fn ones_own_work_channel_can_be_heard_too_and_stays_when_its_subscriber_leaves() {
    in_virtual_time(async {
        let mut rig = gate().await;
        let (mut a, work) = (TestProbe::start(), FakeDirect::channel_of(rig.instance));
        subscribe(&rig, &work, &a).await;
        rig.server.ring(&work, "orphan");
        quiesce().await;
        assert_eq!(a.take(), [listening(&work), rung(&work, "orphan")]);
        unsubscribe(&rig, &work, &a).await;
        assert_eq!(issued(&rig.server, &work), (1, 0));
        rig.wake.take();
        assert!(rig.server.ring(&work, "orphan"));
        rig.wake.expect_within(Duration::from_millis(1)).await;
    });
}
