//! An instance that was evicted does nothing more under its id, and goes on under a fresh one.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::instance::InstanceId;
use workpump_actors::message::{Pause, Resume, Unfence};
use workpump_actors::options::{OnEvicted, Options};
use workpump_actors::registry::Host;
use workpump_actors::runner::Runner;
use workpump_actors::testing::{
    Call, FakeDirect, FakeStore, Op, Reply, Row, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn options() -> Options {
    let mut options = Options::default();
    options.claim.polling_max_interval_milliseconds = 250;
    options.dispatch.drain_deadline_seconds = 5;
    options
}

/// Handles until it is told to stop, and notes under which id, and whether it was told.
#[derive(Clone, Default)]
struct Runs(Arc<Mutex<Vec<(InstanceId, &'static str)>>>);

impl Runs {
    fn runner(&self, time: Duration, obedient: bool) -> Vec<(Category, Arc<dyn Runner>)> {
        let runs = self.clone();
        let run = runner(1, move |job| {
            let runs = runs.clone();
            async move {
                runs.note(job.instance, "start");
                tokio::select! {
                    () = sleep(time) => {}
                    () = job.cancel.cancelled(), if obedient => runs.note(job.instance, "told to stop"),
                }
                runs.note(job.instance, "end");
                Ok(())
            }
        });
        vec![(Category::Inbox, run)]
    }

    fn note(&self, instance: InstanceId, what: &'static str) {
        self.0.lock().expect("not poisoned").push((instance, what));
    }

    fn of(&self, instance: InstanceId) -> Vec<&'static str> {
        let runs = self.0.lock().expect("not poisoned");
        runs.iter().filter(|(of, _)| *of == instance).map(|(_, what)| *what).collect()
    }
}

async fn start(options: Options, store: &Arc<FakeStore>, runs: Vec<(Category, Arc<dyn Runner>)>) -> Engine {
    store.members_only();
    Engine::start_on(engine_parts(options, store, runs), Host::current()).await.expect("starts")
}

/// Who beat, in order of the first time.
fn ids(store: &FakeStore) -> Vec<InstanceId> {
    let mut ids = Vec::new();
    for call in store.calls() {
        if let Call::Beat(beat) = call
            && !ids.contains(&beat.identity.id)
        {
            ids.push(beat.identity.id);
        }
    }
    ids
}

#[test]
fn it_comes_back_under_a_fresh_id_and_runs_the_row_again() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(60), true)).await;
        let first = engine.instance_id();
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        store.evict(first);
        sleep(seconds(1)).await;
        let second = engine.instance_id();
        assert_ne!(first, second);
        assert_eq!(runs.of(first), ["start", "told to stop", "end"]);
        assert!(store.is_member(second) && engine.is_ready());
        store.finished().await;
        assert_eq!(runs.of(second), ["start", "end"]);
        assert_eq!(store.settled().len(), 1, "the result of the evicted id was discarded");
        assert_eq!(ids(&store), [first, second]);
        assert!(engine.drain().await.deregistered);
        assert!(!store.is_member(second));
    });
}

#[test]
fn nothing_is_sent_under_the_burnt_id_after_it_is_known_and_it_is_not_ready_in_between() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        // Deaf for 3 s after it was told to stop, so that there is an in-between.
        let engine = start(options(), &store, runs.runner(seconds(4), false)).await;
        let first = engine.instance_id();
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        store.evict(first);
        // The next poll is refused.
        sleep(Duration::from_millis(500)).await;
        let known = store.calls().len();
        assert!(!engine.is_ready());
        assert_eq!(engine.instance_id(), first, "its handler is still waited for");
        sleep(Duration::from_millis(2_400)).await;
        assert!(!engine.is_ready());
        assert_eq!(store.calls().len(), known);
        sleep(seconds(1)).await;
        assert!(engine.is_ready());
        let late = store.calls().split_off(known);
        let of_first = late.iter().any(|call| match call {
            Call::Beat(beat) => beat.identity.id == first,
            Call::Claim(claim) => claim.instance == first,
            Call::Settle(_) => store.settled().is_empty(),
            _ => false,
        });
        assert!(!of_first, "{late:?}");
        engine.drain().await;
    });
}

#[test]
fn a_handler_that_does_not_stop_is_given_up_at_the_drain_deadline() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(3_600), false)).await;
        let first = engine.instance_id();
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        store.evict(first);
        sleep(seconds(4)).await;
        assert_eq!(engine.instance_id(), first);
        sleep(seconds(3)).await;
        assert_ne!(engine.instance_id(), first);
        assert_eq!(runs.of(first), ["start"], "it was dropped where it waited");
        assert_eq!(runs.of(engine.instance_id()), ["start"]);
        sleep(Duration::from_hours(2)).await;
        assert_eq!(runs.of(first), ["start"], "for good");
        engine.drain().await;
    });
}

#[test]
fn the_first_claim_under_the_new_id_waits_for_its_first_accepted_beat() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(1), true)).await;
        let first = engine.instance_id();
        store.always(move |call| {
            matches!(call, Call::Beat(beat) if beat.identity.id != first).then(|| Reply::Slow(seconds(5)))
        });
        store.evict(first);
        sleep(seconds(4)).await;
        let second = engine.instance_id();
        assert_ne!(first, second);
        assert!(!engine.is_ready());
        // News of the life before, which was still on its way.
        engine.recipient::<Unfence>().expect("the warden").do_send(Unfence);
        quiesce().await;
        assert!(!engine.is_ready());
        let claimed = |store: &FakeStore| {
            store.calls().iter().any(|call| matches!(call, Call::Claim(claim) if claim.instance == second))
        };
        assert!(!claimed(&store));
        sleep(seconds(5)).await;
        assert!(claimed(&store) && engine.is_ready());
        engine.drain().await;
    });
}

#[test]
fn the_lock_and_the_channel_of_the_new_id_are_taken_in_a_session_of_its_own() {
    in_virtual_time(async {
        let (store, direct, runs) = (FakeStore::new(), FakeDirect::new(), Runs::default());
        let mut parts = engine_parts(options(), &store, runs.runner(seconds(1), true));
        parts.direct = Some(Arc::new(direct.clone()));
        parts.route = Arc::new(direct.clone());
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        let first = engine.instance_id();
        quiesce().await;
        assert!(direct.holds_lock(first));
        store.evict(first);
        store.insert(Row::default());
        store.finished().await;
        let second = engine.instance_id();
        assert!(direct.holds_lock(second) && !direct.holds_lock(first));
        assert_eq!(direct.channels(), [FakeDirect::channel_of(second)]);
        assert!(engine.is_alive_lock_held());
        engine.drain().await;
    });
}

#[test]
fn an_id_is_never_used_twice_and_an_instance_that_is_evicted_again_and_again_slows_down() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(1), true)).await;
        let begin = Instant::now();
        for _ in 0..6 {
            let current = engine.instance_id();
            store.evict(current);
            while engine.instance_id() == current || !engine.is_ready() {
                sleep(Duration::from_millis(50)).await;
            }
        }
        let ids = ids(&store);
        assert_eq!(ids.len(), 7);
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 7);
        // 0 + 1 + 2 + 4 + 8 + 16 s, and the polls that find out.
        assert!(begin.elapsed() >= seconds(31), "{:?}", begin.elapsed());
        assert!(engine.registry().health().is_ready());
        assert_eq!(engine.registry().totals().restarts, 0, "none of them counts as a death");
        engine.drain().await;
    });
}

#[test]
fn with_stop_it_stays_down() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let mut options = options();
        options.liveness.on_evicted = OnEvicted::Stop;
        let engine = start(options, &store, runs.runner(seconds(1), true)).await;
        let first = engine.instance_id();
        store.evict(first);
        sleep(seconds(60)).await;
        let calls = store.calls().len();
        sleep(Duration::from_hours(1)).await;
        assert_eq!((store.calls().len(), engine.instance_id()), (calls, first));
        assert!(!engine.is_ready());
        assert!(!engine.drain().await.deregistered);
    });
}

#[test]
fn a_pause_outlives_the_eviction() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(1), true)).await;
        engine.recipient::<Pause>().expect("somebody pauses").do_send(Pause);
        quiesce().await;
        let first = engine.instance_id();
        store.evict(first);
        store.insert(Row::default());
        sleep(seconds(90)).await;
        assert_ne!(engine.instance_id(), first);
        assert_eq!(store.unfinished(), 1);
        engine.recipient::<Resume>().expect("somebody resumes").do_send(Resume);
        store.finished().await;
        engine.drain().await;
    });
}

#[test]
fn a_drain_during_the_change_of_lives_ends_well() {
    in_virtual_time(async {
        for at in [0, 1, 250, 251, 300, 1_000, 3_000, 5_200, 5_500] {
            let (store, runs) = (FakeStore::new(), Runs::default());
            let engine = start(options(), &store, runs.runner(seconds(3_600), false)).await;
            store.insert(Row::default());
            engine.request_immediate_poll();
            sleep(seconds(1)).await;
            store.evict(engine.instance_id());
            sleep(Duration::from_millis(at)).await;
            let begin = Instant::now();
            engine.drain().await;
            assert!(begin.elapsed() < seconds(60), "{at}: {:?}", begin.elapsed());
            for id in ids(&store) {
                assert!(!store.is_member(id), "{at}: nobody is left behind");
            }
        }
    });
}

#[test]
fn a_warden_that_dies_of_the_news_leaves_the_next_life_to_the_next_warden() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(1), true)).await;
        let first = engine.instance_id();
        store.script(Op::Claim, Reply::Slow(seconds(1)));
        store.evict(first);
        sleep(Duration::from_millis(900)).await;
        engine.registry().crash("warden").expect("there is one");
        sleep(seconds(5)).await;
        assert_ne!(engine.instance_id(), first);
        assert!(engine.is_ready());
        engine.drain().await;
    });
}

#[test]
fn whoever_dies_in_the_next_life_is_made_again_for_it_and_not_for_the_one_before() {
    in_virtual_time(async {
        let (store, runs) = (FakeStore::new(), Runs::default());
        let engine = start(options(), &store, runs.runner(seconds(1), true)).await;
        let first = engine.instance_id();
        let beats = Arc::new(AtomicUsize::new(0));
        store.evict(first);
        sleep(seconds(2)).await;
        let counted = Arc::clone(&beats);
        store.always(move |call| {
            if matches!(call, Call::Beat(beat) if beat.identity.id == first) {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            None
        });
        for child in ["heartbeat", "notify_gate", "claim", "settle", "dispatch", "warden"] {
            engine.registry().crash(child).expect("there is one");
            sleep(seconds(1)).await;
        }
        assert_eq!(beats.load(Ordering::SeqCst), 0);
        assert!(engine.is_ready());
        engine.drain().await;
    });
}
