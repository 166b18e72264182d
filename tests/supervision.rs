//! The tree of a pump on a real database: its actors are killed while work flows, and a user's own actor lives among them.

mod common;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix::prelude::*;
use common::wait::{PATIENCE, eventually};
use common::{quick, scale};
use rand::RngExt;
use serde_json::json;
use tokio::time::timeout;
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::supervision::{
    EventKind, EvictionReason, PeerEvicted, Spec, SubscribeToEvictions, SupervisorEvent, SweepNow,
};
use workpump::{Failure, NewOutbox, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

const STREAMS: u64 = 40;

/// Every actor of the pump.
const ACTORS: [&str; 8] =
    ["lease_renewal", "warden", "notify_gate", "heartbeat", "settle", "dispatch", "stale_sweep", "claim"];

/// What was relayed, in the order in which it was.
#[derive(Clone, Default)]
struct Journal(Arc<Mutex<Vec<(Uuid, u64)>>>);

impl Journal {
    fn read(&self) -> Vec<(Uuid, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Publisher for Journal {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let payload: serde_json::Value = serde_json::from_slice(&message.payload)?;
        let number = payload["number"].as_u64().ok_or_else(|| Failure::permanent("no number"))?;
        // Some handlers wait, so that an actor dies while they do.
        if number.is_multiple_of(3) {
            tokio::time::sleep(Duration::from_millis(number % 7)).await;
        }
        let stream = message.stream_id.unwrap_or_default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((stream, number));
        Ok(())
    }
}

/// Stores messages in all streams until it is told to stop. Returns how many.
async fn produce(client: Client, stop: tokio_util::sync::CancellationToken) -> u64 {
    let producer = Producer::new("public").expect("a schema name");
    let mut stored = 0;
    while !stop.is_cancelled() {
        let batch: Vec<NewOutbox> = (0..100)
            .map(|offset| {
                let number = stored + offset;
                let stream = Uuid::from_u128(u128::from(number % STREAMS) + 1);
                NewOutbox::new("step", &json!({ "number": number })).stream(stream)
            })
            .collect();
        let enqueued = producer.outbox(&client, &batch).await.expect("stored");
        stored += enqueued.stored.len() as u64;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stored
}

/// Kills every actor of the pump, some at once, some between two messages, and waits until all are back.
async fn kill_them_all(pump: &WorkPump) {
    let mut events = pump.registry().events();
    let mut dead: HashSet<&str> = HashSet::from(ACTORS);
    for name in dead.clone() {
        let pause = rand::make_rng::<rand::rngs::SmallRng>().random_range(0..15);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        pump.registry().crash(name).expect("a child of the tree");
    }
    while !dead.is_empty() {
        let event = events.recv().await.expect("the tree tells");
        match event.kind {
            EventKind::Ready => drop(dead.remove(&*event.child)),
            EventKind::GaveUp { .. } => panic!("given up: {event}"),
            _ => {}
        }
    }
}

/// Nothing lost, and in each stream the first delivery of every message in order.
fn judge(journal: &[(Uuid, u64)], stored: u64) -> usize {
    let (mut seen, mut next) = (HashSet::new(), HashMap::<Uuid, u64>::new());
    for (stream, number) in journal {
        if !seen.insert(*number) {
            continue;
        }
        let expected = next.entry(*stream).or_insert_with(|| number % STREAMS);
        assert_eq!(number, expected, "out of order in stream {stream}");
        *expected += STREAMS;
    }
    assert_eq!(seen.len() as u64, stored, "lost");
    journal.len() - seen.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_every_actor_in_turn_while_work_flows_loses_nothing_and_keeps_order() {
    let database = common::database().await;
    let journal = Journal::default();
    let start = || WorkPump::builder(database.url()).options(quick()).publisher(journal.clone()).start();
    let (pump, neighbour) = (start().await.expect("starts"), start().await.expect("starts"));
    let stop = tokio_util::sync::CancellationToken::new();
    let producing = tokio::spawn(produce(database.connect().await, stop.clone()));
    let mut kills = 0;
    for round in 0..4 * scale() {
        // The limit is ten in a minute.
        if round > 0 && round.is_multiple_of(8) {
            tokio::time::sleep(Duration::from_mins(1)).await;
        }
        kill_them_all(&pump).await;
        kills += ACTORS.len() as u64;
    }
    stop.cancel();
    let stored = producing.await.expect("no panic");
    let all_there = async || {
        let seen: HashSet<u64> = journal.read().into_iter().map(|(_, number)| number).collect();
        seen.len() as u64 == stored
    };
    eventually("every message is relayed", all_there).await;
    assert!(pump.is_ready(), "{}", pump.registry().health());
    assert_eq!(pump.registry().totals().restarts, kills);
    let in_flight = async || {
        let accounts = pump.observe().await;
        accounts.iter().map(|account| account.counter("in_flight")).sum::<u64>() == 0
    };
    eventually("every permit is back", in_flight).await;
    for pump in [pump, neighbour] {
        let report = pump.drain().await;
        assert!(report.deregistered && report.unsettled == 0, "{report:?}");
    }
    let duplicates = judge(&journal.read(), stored);
    println!("{kills} kills, {stored} messages in {STREAMS} streams: {duplicates} relayed twice");
    assert_eq!(duplicates, 0, "what had finished is remembered outside of the actors");
}

/// Counts what it is told, and panics when it is told to.
#[derive(Default)]
struct Mailer {
    sent: u64,
}

impl Actor for Mailer {
    type Context = Context<Self>;
}

#[derive(Message)]
#[rtype(result = "u64")]
struct Letter(&'static str);

impl Handler<Letter> for Mailer {
    type Result = u64;

    fn handle(&mut self, Letter(to): Letter, _: &mut Self::Context) -> u64 {
        assert!(to.contains('@'), "no address");
        self.sent += 1;
        self.sent
    }
}

/// Keeps what happened.
#[derive(Default)]
struct Diary(Vec<SupervisorEvent>);

impl Actor for Diary {
    type Context = Context<Self>;
}

impl Handler<SupervisorEvent> for Diary {
    type Result = ();

    fn handle(&mut self, event: SupervisorEvent, _: &mut Self::Context) {
        self.0.push(event);
    }
}

#[derive(Message)]
#[rtype(result = "Vec<SupervisorEvent>")]
struct Read;

impl Handler<Read> for Diary {
    type Result = Vec<SupervisorEvent>;

    fn handle(&mut self, _: Read, _: &mut Self::Context) -> Self::Result {
        self.0.clone()
    }
}

#[tokio::test]
async fn a_users_actor_lives_in_the_tree_and_is_replaced_when_it_dies() {
    let database = common::database().await;
    let mailer = Spec::new("mailer", |_| Mailer::default());
    let diary = Spec::new("diary", |cx| {
        cx.registry().subscribe(cx.addr().recipient());
        Diary::default()
    });
    let letters = mailer.addr();
    let pump = WorkPump::builder(database.url())
        .options(quick())
        .publisher(Journal::default())
        .supervise(diary)
        .supervise(mailer)
        .start()
        .await
        .expect("starts");
    assert_eq!(letters.send(Letter("a@b")).await, Ok(1));
    assert!(letters.send(Letter("nobody")).await.is_err());
    assert_eq!(letters.send(Letter("c@d")).await, Ok(1), "a fresh one");
    let diary = pump.registry().addr::<Diary>().expect("supervised");
    let deaths = async || {
        let events = diary.send(Read).await.expect("its queue outlives it");
        let of_mailer = events.iter().filter(|event| event.child == "mailer");
        of_mailer.filter(|event| matches!(event.kind, EventKind::Exited { .. })).count()
    };
    // What the first life has not read by its death, the second one reads.
    eventually("the first death is noted", async || deaths().await == 1).await;
    // Asked again by its second life, the diary still hears everything once.
    pump.registry().crash("diary").expect("a child");
    eventually("the diary is a fresh one", async || deaths().await == 0).await;
    assert!(letters.send(Letter("nobody")).await.is_err());
    eventually("the second death is noted", async || deaths().await > 0).await;
    assert_eq!(deaths().await, 1, "once");
    assert_eq!(letters.send(Letter("e@f")).await, Ok(1));
    pump.drain().await;
    assert!(!letters.connected());
}

#[tokio::test]
async fn a_user_actor_that_takes_a_name_of_the_pump_is_refused_by_name() {
    let database = common::database().await;
    let started = WorkPump::builder(database.url())
        .publisher(Journal::default())
        .supervise(Spec::new("claim", |_| Mailer::default()))
        .start()
        .await;
    let error = started.expect_err("refused").to_string();
    assert!(error.contains("already a child called claim"), "{error}");
}

/// Is told of evictions, in every life.
struct Pager(tokio::sync::mpsc::UnboundedSender<PeerEvicted>);

impl Actor for Pager {
    type Context = Context<Self>;
}

impl Handler<PeerEvicted> for Pager {
    type Result = ();

    fn handle(&mut self, news: PeerEvicted, _: &mut Self::Context) {
        // The test may be over.
        let _ = self.0.send(news);
    }
}

/// A member that has not beaten for an hour and still leases a row.
async fn dead_member(client: &Client) -> Uuid {
    let dead = Uuid::now_v7();
    let sql = format!(
        "insert into wh_service_instances (instance_id, service_name, host_name, process_id, last_heartbeat_at) \
         values ('{dead}', 's', 'h', 1, clock_timestamp() - interval '1 hour'); \
         insert into wh_outbox (message_type, payload, instance_id, lease_expiry, claim_epoch, attempts) \
         values ('step', '{{\"number\": 0}}', '{dead}', clock_timestamp() + interval '1 hour', 1, 1)"
    );
    client.batch_execute(&sql).await.expect("a dead member");
    dead
}

#[tokio::test]
async fn who_subscribes_is_told_of_evictions_also_after_the_sweeping_actor_died() {
    let database = common::database().await;
    let client = database.connect().await;
    let (told, mut telling) = tokio::sync::mpsc::unbounded_channel();
    let pager = Spec::new("pager", move |cx| {
        let sweep = cx.registry().recipient::<SubscribeToEvictions>().expect("a child of the pump");
        sweep.do_send(SubscribeToEvictions(cx.addr().recipient()));
        Pager(told.clone())
    });
    // The sweep of a beat would be faster, and tells nobody.
    let mut options = quick();
    options.heartbeat.interval_seconds = 100;
    options.heartbeat.slow_interval_seconds = 100;
    let journal = Journal::default();
    let builder = WorkPump::builder(database.url()).options(options).publisher(journal.clone());
    let pump = builder.supervise(pager).start().await.expect("starts");
    let sweep = pump.registry().recipient::<SweepNow>().expect("a child of the pump");
    for round in 1..=2 {
        let dead = dead_member(&client).await;
        sweep.do_send(SweepNow);
        let news = timeout(PATIENCE, telling.recv()).await.expect("told").expect("the pager lives");
        assert_eq!(news.instance.0, dead);
        assert_eq!(news.reason, EvictionReason::StaleHeartbeat);
        eventually("the row of the dead is relayed", async || journal.read().len() == round).await;
        let evictions = workpump::evictions(database.url(), "public").await.expect("evictions");
        assert_eq!(evictions[0].instance_id, dead);
        assert_eq!(evictions[0].evicted_by, Some(pump.instance_id()));
        pump.registry().crash("stale_sweep").expect("a child of the pump");
    }
    pump.drain().await;
}
