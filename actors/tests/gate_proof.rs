//! The proof of the gate: what makes it available, what does not, who is blamed, and who is told, once.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use workpump_actors::instance::{AliveLock, Gate};
use workpump_actors::message::{AliveLockChanged, Drain, Evicted, GateChanged, ProbeNow, Subscribe};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{DirectOp, FakeDirect, GateRig, Reply, TestProbe, in_virtual_time, quiesce};

use Gate::{Available, Unavailable};

const HOUR: Duration = Duration::from_hours(1);

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

fn failing(op: DirectOp) -> impl Fn(DirectOp) -> Option<Reply> + Send + 'static {
    move |asked| (asked == op).then(|| Reply::Fail(unavailable()))
}

/// A gate that has been proven.
async fn proven() -> GateRig {
    let mut rig = GateRig::start(&Options::default(), &FakeDirect::new());
    rig.ready().await;
    assert_eq!(rig.gates(), [Available]);
    rig
}

fn reason(rig: &GateRig) -> String {
    rig.standing.gate_report().reason.unwrap_or_default()
}

#[test]
fn what_is_rung_by_the_producers_route_and_heard_on_the_session_makes_the_gate_available_once() {
    in_virtual_time(async {
        let rig = proven().await;
        let sent = rig.server.sent();
        assert_eq!((sent.len(), &sent[0].0), (1, &FakeDirect::channel_of(rig.instance)));
        assert!(sent[0].1.starts_with("probe ") && sent[0].1.len() > 20, "{}", sent[0].1);
        let report = rig.standing.gate_report();
        assert_eq!((report.gate, report.reason, report.changes), (Available, None, 1));
        assert_eq!((report.last_verified_seconds_ago, report.last_failure), (Some(0.0), None));
        let account = rig.account().await;
        assert_eq!(
            (account.counter("probes"), account.counter("proofs"), account.counter("rings")),
            (1, 1, 0)
        );
        assert_eq!(account.notes["gate"], "available");
    });
}

#[test]
fn an_idle_gate_costs_one_statement_in_thirty_seconds_and_nothing_else() {
    in_virtual_time(async {
        let mut rig = proven().await;
        sleep(HOUR + seconds(1)).await;
        let probes = rig.server.times(DirectOp::Ring);
        assert_eq!(probes.len(), 121);
        assert!(probes.windows(2).all(|pair| pair[1].saturating_sub(pair[0]) == seconds(30)));
        for op in [DirectOp::Ping, DirectOp::Notify, DirectOp::Unlisten] {
            assert_eq!(rig.server.count(op), 0);
        }
        assert_eq!((rig.server.count(DirectOp::Connect), rig.server.count(DirectOp::Listen)), (1, 1));
        assert!(rig.gates().is_empty() && rig.wake.take().is_empty(), "a probe is no doorbell");
        let nonces: std::collections::HashSet<_> = rig.server.sent().into_iter().collect();
        assert_eq!(nonces.len(), 121, "each has a nonce of its own");
    });
}

#[test]
fn doorbells_replace_no_probe() {
    in_virtual_time(async {
        let rig = proven().await;
        for _ in 0..60 {
            sleep(seconds(10)).await;
            rig.server.ring(&FakeDirect::channel_of(rig.instance), "outbox");
        }
        quiesce().await;
        assert_eq!(rig.server.count(DirectOp::Ring), 21);
        assert_eq!(rig.account().await.counter("rings"), 60);
    });
}

#[test]
fn a_listener_that_never_hears_anything_is_a_suspected_pooler_within_the_self_test_and_never_available() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.set_deaf(true);
        let mut rig = GateRig::start(&Options::default(), &server);
        let start = Instant::now();
        rig.ready().await;
        assert_eq!(start.elapsed(), seconds(2));
        assert_eq!(rig.gates(), [Unavailable]);
        assert!(
            reason(&rig).starts_with("pooler suspected: LISTEN accepted, nothing delivered"),
            "{}",
            reason(&rig)
        );
        sleep(HOUR).await;
        assert!(rig.gates().is_empty());
        assert_eq!(rig.standing.gate_report().last_verified_seconds_ago, None);
    });
}

#[test]
fn where_every_session_is_deaf_the_second_one_is_kept_with_its_lock_and_proven_again_ever_more_rarely() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.set_deaf(true);
        let mut rig = GateRig::start(&Options::default(), &server);
        sleep(HOUR).await;
        assert_eq!(server.sessions(), 2, "the first one may have been to blame");
        assert!(server.holds_lock(rig.instance));
        let locks: Vec<_> = rig.lock.take().into_iter().map(|AliveLockChanged(lock)| lock).collect();
        assert_eq!(locks, [AliveLock::Held, AliveLock::NotHeld, AliveLock::Held]);
        let probes = server.count(DirectOp::Ring);
        assert!((110..=160).contains(&probes), "{probes}");
        server.set_deaf(false);
        sleep(seconds(38)).await;
        assert_eq!(rig.gates(), [Unavailable, Available]);
        assert_eq!(server.sessions(), 2);
    });
}

#[test]
fn a_listener_that_grows_deaf_is_found_within_interval_and_timeout_and_its_session_is_replaced() {
    in_virtual_time(async {
        let mut rig = proven().await;
        sleep(seconds(45)).await;
        let start = Instant::now();
        rig.server.set_deaf(true);
        rig.server.script(DirectOp::Connect, Reply::Slow(Duration::from_millis(500)));
        let flip = timeout(HOUR, rig.news.next()).await.expect("it is found");
        assert_eq!(flip, GateChanged(Unavailable));
        assert!(start.elapsed() <= seconds(35), "{:?}", start.elapsed());
        assert!(reason(&rig).contains("deaf"), "{}", reason(&rig));
        rig.server.set_deaf(false);
        sleep(seconds(1)).await;
        assert_eq!((rig.gates(), rig.server.sessions()), (vec![Available], 2));
        let account = rig.account().await;
        assert_eq!((account.counter("probes_not_heard"), account.counter("losses")), (1, 1));
    });
}

#[test]
fn a_ring_that_cannot_be_sent_closes_the_gate_and_costs_no_session() {
    in_virtual_time(async {
        let mut rig = proven().await;
        rig.server.always(failing(DirectOp::Ring));
        sleep(seconds(60)).await;
        assert_eq!(rig.gates(), [Unavailable]);
        assert_eq!(reason(&rig), "a probe could not be sent: database unavailable: connection refused");
        assert_eq!(rig.server.sessions(), 1);
        assert!(rig.server.holds_lock(rig.instance));
        let times = rig.server.times(DirectOp::Ring);
        let gaps: Vec<_> =
            times[1..].windows(2).map(|pair| pair[1].saturating_sub(pair[0]).as_millis() as f64).collect();
        for (gap, bare) in gaps.iter().zip([250.0, 500.0, 1_000.0, 2_000.0, 4_000.0, 5_000.0, 5_000.0]) {
            assert!((bare * 0.79..=bare * 1.21).contains(gap), "{gap} for {bare}");
        }
        assert_eq!(rig.server.count(DirectOp::Ping), times.len() - 1, "the session is asked each time");
        rig.server.recover();
        sleep(seconds(7)).await;
        assert_eq!((rig.gates(), rig.server.sessions()), (vec![Available], 1));
    });
}

#[test]
fn a_ring_that_is_not_answered_counts_as_not_sent_after_its_timeout() {
    in_virtual_time(async {
        let mut rig = proven().await;
        rig.server.script(DirectOp::Ring, Reply::Hang);
        sleep(seconds(34)).await;
        assert!(rig.gates().is_empty());
        sleep(seconds(2)).await;
        assert_eq!((rig.gates(), rig.server.sessions()), (vec![Unavailable, Available], 1));
        let failure = rig.standing.gate_report().last_failure.expect("there was one");
        assert_eq!(failure, "a probe could not be sent: database unavailable: no answer within 5 s");
    });
}

#[test]
fn where_neither_the_route_nor_the_session_answers_the_session_is_given_up_too() {
    in_virtual_time(async {
        let mut rig = proven().await;
        rig.server.always(|op| match op {
            DirectOp::Ring | DirectOp::Connect => Some(Reply::Fail(unavailable())),
            DirectOp::Ping => Some(Reply::Hang),
            _ => None,
        });
        sleep(seconds(60)).await;
        assert!(!rig.server.is_connected());
        assert_eq!(rig.gates(), [Unavailable]);
        rig.server.recover();
        sleep(seconds(5)).await;
        assert_eq!((rig.gates(), rig.server.sessions()), (vec![Available], 2));
    });
}

#[test]
fn a_call_without_an_answer_keeps_no_session_open_that_was_given_up() {
    in_virtual_time(async {
        let mut rig = proven().await;
        let work = rig.server.clone();
        rig.server.take_lock(rig.instance);
        rig.server.end_session();
        sleep(seconds(1)).await;
        rig.gates();
        rig.server.always(|op| (op == DirectOp::ClaimLock).then_some(Reply::Hang));
        rig.server.set_deaf(true);
        sleep(seconds(2)).await;
        rig.addr.do_send(ProbeNow);
        sleep(Duration::from_millis(4_900)).await;
        assert!(
            work.is_connected() && rig.gates().is_empty(),
            "a claim of the lock hangs, and the proof is under way"
        );
        work.always(|op| (op == DirectOp::Connect).then(|| Reply::Fail(unavailable())));
        sleep(Duration::from_millis(200)).await;
        assert_eq!(rig.gates(), [Unavailable]);
        assert!(!work.is_connected(), "nothing holds it any more");
    });
}

#[test]
fn a_new_session_is_proven_before_the_gate_opens_again_and_nobody_is_woken_besides() {
    in_virtual_time(async {
        let mut rig = proven().await;
        sleep(seconds(10)).await;
        rig.server.script(DirectOp::Ring, Reply::Slow(Duration::from_millis(700)));
        rig.server.end_session();
        sleep(Duration::from_millis(600)).await;
        assert_eq!(rig.gates(), [Unavailable]);
        assert_eq!(rig.server.channels().len(), 1, "it listens, and that alone proves nothing");
        sleep(Duration::from_millis(200)).await;
        assert_eq!(rig.gates(), [Available]);
        assert!(rig.wake.take().is_empty(), "the change itself is the look");
    });
}

#[test]
fn the_ring_of_an_earlier_proof_proves_nothing() {
    in_virtual_time(async {
        let mut rig = proven().await;
        let old = rig.server.sent().pop().expect("one");
        rig.server.set_deaf(true);
        rig.server.script(DirectOp::Connect, Reply::Slow(seconds(1)));
        let flip = timeout(HOUR, rig.news.next()).await.expect("it is found");
        assert_eq!(flip, GateChanged(Unavailable));
        rig.server.script(DirectOp::Ring, Reply::Slow(seconds(3)));
        rig.server.set_deaf(false);
        sleep(seconds(2)).await;
        assert!(rig.server.ring(&old.0, &old.1));
        rig.server.ring(&old.0, "probe of somebody else");
        quiesce().await;
        assert!(rig.gates().is_empty());
        assert!(rig.wake.take().is_empty());
        sleep(seconds(3)).await;
        assert_eq!(rig.gates(), [Available]);
    });
}

#[test]
fn many_askers_share_one_proof_and_get_its_result() {
    in_virtual_time(async {
        let mut rig = proven().await;
        sleep(seconds(10)).await;
        rig.server.script(DirectOp::Ring, Reply::Slow(Duration::from_millis(50)));
        let asked = futures_util::future::join_all((0..20).map(|_| rig.probe())).await;
        assert!(
            asked
                .iter()
                .all(|report| report.gate == Available && report.last_verified_seconds_ago == Some(0.0))
        );
        assert_eq!(rig.server.count(DirectOp::Ring), 2);
        sleep(Duration::from_millis(29_900)).await;
        assert_eq!(rig.server.count(DirectOp::Ring), 2, "the next one by itself comes an interval later");
        rig.server.set_deaf(true);
        let report = rig.probe().await;
        assert_eq!(report.gate, Unavailable);
        assert_eq!(rig.gates(), [Unavailable]);
    });
}

#[test]
fn whoever_asks_without_a_session_has_one_opened_at_once_and_whoever_stops_asking_changes_nothing() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        let pooler = || Reply::Fail(StoreError::NotDirect("start-up options are refused".to_owned()));
        server.always(move |op| (op == DirectOp::Connect).then(pooler));
        let mut rig = GateRig::start(&Options::default(), &server);
        rig.ready().await;
        assert_eq!(rig.probe().await.reason.as_deref(), Some(reason(&rig).as_str()));
        assert!(reason(&rig).contains("not a direct connection"), "{}", reason(&rig));
        assert_eq!(server.count(DirectOp::Connect), 2);
        server.recover();
        server.script(DirectOp::Connect, Reply::Slow(seconds(1)));
        assert!(timeout(Duration::from_millis(100), rig.probe()).await.is_err());
        assert_eq!(rig.probe().await.gate, Available);
        assert_eq!(server.sessions(), 1);
        assert_eq!(rig.gates(), [Unavailable, Available]);
    });
}

#[test]
fn whoever_asks_while_the_work_channel_cannot_be_listened_to_has_it_tried_again() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.always(failing(DirectOp::Listen));
        let mut rig = GateRig::start(&Options::default(), &server);
        rig.ready().await;
        assert!(reason(&rig).starts_with("the work channel cannot be listened to"), "{}", reason(&rig));
        assert!(server.holds_lock(rig.instance), "the lock is worth the session");
        assert_eq!(rig.probe().await.gate, Unavailable);
        assert_eq!(server.count(DirectOp::Listen), 2);
        sleep(seconds(10)).await;
        assert_eq!((rig.gates(), server.sessions()), (vec![Unavailable], 1));
        server.recover();
        sleep(seconds(1)).await;
        assert_eq!(rig.gates(), [Available]);
    });
}

#[test]
fn a_users_channel_that_is_refused_does_not_close_the_gate() {
    in_virtual_time(async {
        let mut rig = proven().await;
        let user = TestProbe::start();
        rig.server.set_refused("bad", true);
        rig.addr.do_send(Subscribe { channel: "bad".into(), to: user.recipient() });
        sleep(seconds(5)).await;
        rig.server.end_session();
        sleep(seconds(5)).await;
        assert_eq!(rig.gates(), [Unavailable, Available]);
    });
}

#[test]
fn a_drain_and_an_eviction_close_the_gate_once_and_nothing_is_proven_after() {
    in_virtual_time(async {
        for drained in [true, false] {
            let mut rig = proven().await;
            if drained {
                rig.standing.deregister();
                rig.addr.send(Drain).await.expect("alive");
            } else {
                rig.standing.evict();
                rig.addr.send(Evicted(rig.instance)).await.expect("alive");
            }
            assert_eq!(rig.probe().await.gate, Unavailable);
            sleep(HOUR).await;
            assert_eq!(rig.gates(), [Unavailable]);
            assert_eq!(rig.server.count(DirectOp::Ring), 1);
            rig.restart().await;
            sleep(HOUR).await;
            assert!(rig.gates().is_empty() && rig.server.sessions() == 1, "{}", reason(&rig));
        }
    });
}

#[test]
fn the_death_of_the_actor_closes_the_gate_and_the_next_life_opens_it_again() {
    in_virtual_time(async {
        let mut rig = proven().await;
        let mut subscriber = rig.subscriber();
        quiesce().await;
        // Nobody may follow it: it was given up.
        rig.end().await;
        quiesce().await;
        assert_eq!(rig.gates(), [Unavailable]);
        assert_eq!(subscriber.take(), [GateChanged(Available), GateChanged(Unavailable)]);
        assert_eq!(reason(&rig), "the actor that keeps the direct session has ended");
        rig.restart().await;
        rig.ready().await;
        quiesce().await;
        assert_eq!(rig.gates(), [Available]);
        assert_eq!(subscriber.take(), [GateChanged(Available)]);
    });
}

#[test]
fn a_subscriber_is_told_how_it_stands_and_then_each_change_once_and_again_when_it_asks_again() {
    in_virtual_time(async {
        let rig = proven().await;
        let mut subscriber = rig.subscriber();
        quiesce().await;
        assert_eq!(subscriber.take(), [GateChanged(Available)]);
        sleep(HOUR).await;
        assert!(subscriber.take().is_empty());
        rig.server.end_session();
        sleep(seconds(5)).await;
        assert_eq!(subscriber.take(), [GateChanged(Unavailable), GateChanged(Available)]);
        rig.addr.do_send(workpump_actors::message::SubscribeToGate(subscriber.recipient()));
        quiesce().await;
        assert_eq!(subscriber.take(), [GateChanged(Available)]);
        rig.server.end_session();
        sleep(seconds(5)).await;
        assert_eq!(subscriber.take(), [GateChanged(Unavailable), GateChanged(Available)]);
    });
}

/// Sleeps first, and then hears what fitted into its mailbox.
struct Sleepy(Arc<std::sync::Mutex<Vec<Gate>>>);

impl Actor for Sleepy {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1);
        ctx.wait(sleep(HOUR).into_actor(self));
    }
}

impl Handler<GateChanged> for Sleepy {
    type Result = ();

    fn handle(&mut self, GateChanged(gate): GateChanged, _: &mut Self::Context) {
        self.0.lock().expect("not poisoned").push(gate);
    }
}

#[test]
fn a_subscriber_without_room_is_told_how_it_stands_once_there_is_room() {
    in_virtual_time(async {
        let rig = proven().await;
        let heard: Arc<std::sync::Mutex<Vec<Gate>>> = Arc::default();
        let sleepy = Sleepy(Arc::clone(&heard)).start();
        rig.addr.do_send(workpump_actors::message::SubscribeToGate(sleepy.recipient()));
        for _ in 0..10 {
            rig.server.end_session();
            sleep(seconds(60)).await;
        }
        rig.server.always(failing(DirectOp::Connect));
        rig.server.end_session();
        sleep(HOUR).await;
        let heard = heard.lock().expect("not poisoned").clone();
        assert!(heard.len() < 15, "{heard:?}");
        assert_eq!(heard.last(), Some(&Unavailable), "{heard:?}");
        assert!(heard.windows(2).all(|pair| pair[0] != pair[1]), "{heard:?}");
    });
}

#[test]
fn a_probe_now_shows_in_the_account_what_went_wrong() {
    in_virtual_time(async {
        let rig = proven().await;
        rig.server.always(failing(DirectOp::Ring));
        rig.addr.send(ProbeNow).await.expect("alive");
        let account = rig.account().await;
        assert_eq!(account.notes["gate"], "unavailable");
        assert!(account.notes["gate_reason"].contains("connection refused"));
        assert_eq!(account.counter("probes_not_sent"), 1);
        assert!(account.last_error.is_some_and(|error| error.contains("connection refused")));
    });
}
