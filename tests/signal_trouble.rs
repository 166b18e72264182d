//! Subscriptions outlive lost sessions, dead actors and evictions; and who looks when told so is right in the end.

mod common;
mod signal_lab;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::wait::eventually;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use signal_lab::{Lab, gate, listening, next, next_value, topic};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::WorkPump;
use workpump::signals::{Signal, Topic};

/// The next that is no repetition of `Listening`: a session may be lost and opened twice.
async fn hears_again(
    lab: &Lab,
    signals: &mut workpump::signals::Signals<u64>,
    topic: &Topic<u64>,
    number: u64,
) {
    assert_eq!(next(signals).await, Signal::Listening);
    lab.signal(topic, &number).await;
    assert_eq!(next_value(signals).await, number);
}

#[tokio::test]
async fn a_lost_session_is_listening_again_and_later_signals_come() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<u64>("t"));
    let mut signals = listening(&pump, &topic).await;
    for number in 0..5 {
        eventually("the session is killed", async || lab.kill_direct_session().await).await;
        hears_again(&lab, &mut signals, &topic, number).await;
    }
    assert!(gate(&pump, "connects").await >= 6);
    pump.drain().await;
}

#[tokio::test]
async fn the_death_of_any_actor_on_the_way_costs_no_subscription() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<u64>("t"));
    let mut signals = listening(&pump, &topic).await;
    pump.registry().crash("notify_gate").unwrap();
    hears_again(&lab, &mut signals, &topic, 1).await;
    let lives = |pump: &WorkPump| pump.registry().totals().restarts;
    let before = lives(&pump);
    pump.registry().crash("signal_hub").unwrap();
    eventually("another hub", async || lives(&pump) > before && pump.is_ready()).await;
    assert_eq!(next(&mut signals).await, Signal::Listening, "what died may have held a signal");
    lab.signal(&topic, &2).await;
    assert_eq!(next(&mut signals).await, Signal::Value(2), "the session was there all the time");
    pump.drain().await;
}

#[tokio::test]
async fn an_evicted_instance_hears_on_under_its_next_id() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<u64>("t"));
    let mut signals = listening(&pump, &topic).await;
    let first = pump.instance_id();
    let evict = "select evict_instance($1, $2, 'by hand')";
    lab.client.query_one(evict, &[&first, &Uuid::now_v7()]).await.unwrap();
    hears_again(&lab, &mut signals, &topic, 1).await;
    eventually("it is somebody else", async || pump.instance_id() != first && pump.is_ready()).await;
    pump.drain().await;
}

#[tokio::test]
async fn a_pump_that_is_dropped_ends_its_streams() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<u64>("t"));
    let mut signals = listening(&pump, &topic).await;
    drop(pump);
    assert_eq!(tokio::time::timeout(common::wait::PATIENCE, signals.recv()).await.unwrap(), None);
}

/// What each change of the state does, in one transaction: the state, and a signal that tells it.
async fn change(client: &mut Client, lab: &Lab, topic: &Topic<i64>) -> i64 {
    let transaction = client.transaction().await.expect("a transaction");
    let change = "update state set value = value + 1 returning value";
    let value: i64 = transaction.query_typed_one(change, &[]).await.expect("an answer").get(0);
    lab.producer.signal(&transaction, topic, &value).await.expect("sent");
    transaction.commit().await.expect("committed");
    value
}

/// A cache as a user writes one: it looks when it is told so, and believes the signals otherwise.
async fn mirror(
    pump: Arc<WorkPump>,
    client: Client,
    topic: Topic<i64>,
    mut rng: StdRng,
    last: i64,
) -> (u64, u64) {
    let (mut cache, mut looks, mut joins) = (0, 0, 0);
    'joined: loop {
        joins += 1;
        let mut signals = pump.subscribe(&topic).keep(rng.random_range(1..8));
        loop {
            match next(&mut signals).await {
                Signal::Value(value) => {
                    // Committed in order, so a gap without a word would be a lie.
                    assert!(value <= cache + 1, "from {cache} to {value}, and nobody said look");
                    cache = cache.max(value);
                }
                Signal::Listening | Signal::Missed { .. } => {
                    looks += 1;
                    let now: i64 = client
                        .query_typed_one("select value from state", &[])
                        .await
                        .expect("an answer")
                        .get(0);
                    assert!(cache <= now);
                    cache = now;
                }
                other => panic!("{other:?}"),
            }
            if cache == last {
                return (looks, joins);
            }
            if rng.random_bool(0.02) {
                // Goes and comes back, while others stay.
                continue 'joined;
            }
            if rng.random_bool(0.1) {
                tokio::time::sleep(std::time::Duration::from_millis(rng.random_range(0..20))).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_that_looks_when_it_is_told_so_is_right_whatever_happens_to_the_session() {
    let seed = rand::random::<u64>();
    eprintln!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let last = 1_500 * i64::from(common::scale());
    let lab = Lab::new().await;
    lab.client
        .batch_execute("create table state (value bigint); insert into state values (0)")
        .await
        .unwrap();
    let (pump, topic) = (Arc::new(lab.pump().await), topic::<i64>("state.changed"));
    let mut caches = Vec::new();
    for _ in 0..6 {
        let client = lab.database.connect().await;
        let rng = StdRng::seed_from_u64(rng.random());
        caches.push(tokio::spawn(mirror(Arc::clone(&pump), client, topic.clone(), rng, last)));
    }
    let over = AtomicBool::new(false);
    let writes = async {
        let mut client = lab.database.connect().await;
        while change(&mut client, &lab, &topic).await < last {}
        over.store(true, Ordering::Release);
    };
    let kills = async {
        let (mut kills, mut deaths) = (0, 0);
        while !over.load(Ordering::Acquire) {
            tokio::time::sleep(std::time::Duration::from_millis(rng.random_range(1..150))).await;
            // Eight deaths of an actor in a minute are no reason to give it up.
            match rng.random_range(0..4) {
                actor @ (0 | 1) if deaths < 8 => {
                    deaths += 1;
                    pump.registry().crash(["notify_gate", "signal_hub"][actor]).expect("it is there");
                }
                _ => kills += u64::from(lab.kill_direct_session().await),
            }
        }
        kills
    };
    let ((), kills) = tokio::join!(writes, kills);
    for cache in caches {
        let (looks, joins) = cache.await.expect("a cache that is right");
        assert!(looks >= joins, "each time it joined it was told to look");
    }
    eprintln!("{kills} sessions killed");
    pump.drain().await;
}
