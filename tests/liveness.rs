//! A pump on a real server: its alive-lock, what happens without it, and what an eviction does to it.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::proxy::Proxy;
use common::wait::eventually;
use common::{Bouncer, Database, quick};
use serde::Deserialize;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::engine::options::LivenessSourceMode;
use workpump::{
    Context, Failure, Handler, NewInbox, NewOutbox, Options, OutboxMessage, Outcome, Publisher, Untrusted,
    WorkPump,
};

/// Tells the test what was published, after a pause that ends early when the lease is lost.
struct Slow {
    pause: Duration,
    told: UnboundedSender<OutboxMessage>,
    done: UnboundedSender<Uuid>,
}

impl Publisher for Slow {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let _ = self.told.send(message.clone());
        tokio::select! {
            () = sleep(self.pause) => {}
            () = message.cancel.cancelled() => return Err(Failure::retry("told to stop")),
        }
        let _ = self.done.send(message.message_id);
        Ok(())
    }
}

struct Bench {
    pump: Arc<WorkPump>,
    started: UnboundedReceiver<OutboxMessage>,
    done: UnboundedReceiver<Uuid>,
}

impl Bench {
    async fn start(url: &str, options: Options, pause: Duration) -> Self {
        let (told, started) = unbounded_channel();
        let (finished, done) = unbounded_channel();
        let publisher = Slow { pause, told, done: finished };
        let pump =
            WorkPump::builder(url).options(options).publisher(publisher).start().await.expect("it starts");
        Self { pump: Arc::new(pump), started, done }
    }

    async fn state_of(&self, actor: &str) -> &'static str {
        self.pump.observe().await.iter().find(|account| account.name == actor).expect("it is there").state
    }
}

async fn store(client: &Client, count: usize) {
    let messages: Vec<_> = (0..count).map(|number| NewOutbox::new("note", &number)).collect();
    let producer = workpump::Producer::new("public").expect("a schema name");
    let _ = producer.outbox(client, &messages).await.expect("stored");
}

async fn value<T: tokio_postgres::types::FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

/// Whether the only member holds its lock, and whether it has declared it.
async fn lock(client: &Client) -> (bool, bool) {
    let members = "select lock_held, lock_declared from wh_live_instances";
    let row = client.query_one(members, &[]).await.expect("one member");
    (row.get(0), row.get(1))
}

async fn until_declared(client: &Client) {
    eventually("the lock, held and declared", async || lock(client).await == (true, true)).await;
}

/// Kills the session that holds the alive-lock of the only member.
async fn kill_lock_session(client: &Client) {
    let kill = "select count(pg_terminate_backend(l.pid)) from pg_locks l, wh_service_instances m \
                where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 1 \
                and (l.classid::bigint << 32) | l.objid::bigint = wh_alive_key(m.instance_id)";
    assert_eq!(value::<i64>(client, kill).await, 1);
}

async fn evictions(client: &Client) -> i64 {
    value(client, "select count(*) from wh_instance_evictions where reason <> 'left'").await
}

async fn database() -> (Database, Client) {
    let db = common::database().await;
    let client = db.connect().await;
    (db, client)
}

#[tokio::test]
async fn a_pump_holds_its_alive_lock_declares_it_and_lets_it_go_with_its_member() {
    let (db, client) = database().await;
    let bench = Bench::start(db.url(), quick(), Duration::ZERO).await;
    until_declared(&client).await;
    assert!(bench.pump.is_alive_lock_held() && bench.pump.is_ready());
    assert_eq!(bench.state_of("notify_gate").await, "connected, alive-lock held");
    let me = bench.pump.instance_id();
    assert_eq!(value::<Uuid>(&client, "select instance_id from wh_live_instances where alive").await, me);
    bench.pump.drain().await;
    let held = format!("select wh_lock_held('{me}')");
    eventually("the end of the lock", async || !value::<bool>(&client, &held).await).await;
    assert_eq!(value::<i64>(&client, "select count(*) from wh_service_instances").await, 0);
}

#[tokio::test]
async fn a_killed_lock_session_is_a_beat_at_once_and_the_lock_again_and_no_eviction() {
    let (db, client) = database().await;
    let mut bench = Bench::start(db.url(), quick(), Duration::from_secs(2)).await;
    until_declared(&client).await;
    let me = bench.pump.instance_id();
    store(&client, 1).await;
    assert!(bench.started.recv().await.is_some());
    for _ in 0..4 {
        let before: std::time::SystemTime =
            value(&client, "select last_heartbeat_at from wh_service_instances").await;
        let start = Instant::now();
        kill_lock_session(&client).await;
        eventually("a beat", async || {
            value::<std::time::SystemTime>(&client, "select last_heartbeat_at from wh_service_instances")
                .await
                > before
        })
        .await;
        until_declared(&client).await;
        println!("lock lost, beaten, held and declared again after {:?}", start.elapsed());
        assert!(bench.pump.is_ready());
    }
    assert!(bench.done.recv().await.is_some());
    assert_eq!((bench.pump.instance_id(), evictions(&client).await), (me, 0));
    assert!(bench.started.try_recv().is_err(), "nothing was given out again");
    bench.pump.drain().await;
}

#[tokio::test]
async fn an_orphan_bell_wakes_a_pump_that_polls_once_an_hour() {
    let (db, client) = database().await;
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 3_600_000;
    options.claim.polling_max_interval_milliseconds = 3_600_000;
    let mut bench = Bench::start(db.url(), options, Duration::ZERO).await;
    until_declared(&client).await;
    store(&client, 1).await;
    client.execute("select wh_ring_members('orphan')", &[]).await.unwrap();
    assert!(bench.started.recv().await.is_some());
    bench.pump.drain().await;
}

#[tokio::test]
async fn the_table_only_mode_holds_no_lock_and_works() {
    let (db, client) = database().await;
    let mut options = quick();
    options.heartbeat.liveness_source_mode = LivenessSourceMode::HeartbeatTableOnly;
    let mut bench = Bench::start(db.url(), options, Duration::from_secs(1)).await;
    assert_eq!(lock(&client).await, (false, false));
    store(&client, 3).await;
    for _ in 0..3 {
        assert!(bench.done.recv().await.is_some());
    }
    assert!(bench.pump.is_ready() && !bench.pump.is_alive_lock_held());
    let interval = "select heartbeat_interval_seconds from wh_service_instances";
    assert_eq!((lock(&client).await, value::<i32>(&client, interval).await), ((false, false), 30));
    bench.pump.drain().await;
}

#[tokio::test]
async fn through_a_pooler_alone_there_is_no_lock_and_everything_works() {
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    let (db, client) = database().await;
    let mut bench = Bench::start(&bouncer.url(db.name()), quick(), Duration::ZERO).await;
    store(&client, 20).await;
    for _ in 0..20 {
        assert!(bench.done.recv().await.is_some());
    }
    assert_eq!(bench.state_of("notify_gate").await, "no direct connection: a pooler answers");
    assert_eq!(lock(&client).await, (false, false));
    assert!(bench.pump.is_ready() && !bench.pump.is_alive_lock_held());
    assert!(bench.pump.drain().await.deregistered);
}

#[tokio::test]
async fn a_pump_with_its_heartbeat_switched_off_never_registers_never_claims_and_says_why() {
    let (db, client) = database().await;
    let mut options = quick();
    options.heartbeat.enabled = false;
    let mut bench = Bench::start(db.url(), options, Duration::ZERO).await;
    store(&client, 1).await;
    bench.pump.wake();
    eventually("a session that listens", async || bench.state_of("notify_gate").await == "connected").await;
    assert_eq!(value::<i64>(&client, "select count(*) from wh_service_instances").await, 0);
    assert_eq!(bench.state_of("claim").await, "disabled with the heartbeat");
    assert_eq!(bench.state_of("heartbeat").await, "disabled");
    assert!(!bench.pump.is_ready() && bench.started.try_recv().is_err());
    bench.pump.drain().await;
}

#[tokio::test]
async fn an_instance_evicted_by_hand_writes_nothing_more_and_goes_on_under_a_fresh_id() {
    let (db, client) = database().await;
    let mut bench = Bench::start(db.url(), quick(), Duration::from_millis(1_500)).await;
    let first = bench.pump.instance_id();
    until_declared(&client).await;
    // Whatever is written under the first id from now on is noted, be it a settlement or a lease.
    store(&client, 10).await;
    for _ in 0..10 {
        let message = bench.started.recv().await.unwrap();
        assert_eq!(message.instance_id, first);
    }
    let operator = Uuid::now_v7();
    let evict = "select evict_instance($1, $2, 'by hand')";
    assert!(client.query_one(evict, &[&first, &operator]).await.unwrap().get::<_, bool>(0));
    for _ in 0..10 {
        assert!(bench.done.recv().await.is_some());
    }
    let second = bench.pump.instance_id();
    assert_ne!(first, second);
    let mut again = 0;
    while let Ok(message) = bench.started.try_recv() {
        assert_eq!(message.instance_id, second, "nothing is started under the burnt id");
        again += 1;
    }
    assert_eq!(again, 10, "each was run again");
    let members: Vec<Uuid> = client
        .query("select instance_id from wh_service_instances", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(members, [second]);
    let leased = format!("select count(*) from wh_outbox where instance_id = '{first}'");
    assert_eq!(value::<i64>(&client, &leased).await, 0);
    until_declared(&client).await;
    assert!(bench.pump.is_ready() && bench.pump.is_alive_lock_held());
    store(&client, 1).await;
    assert!(bench.done.recv().await.is_some(), "and it goes on working");
    assert!(bench.pump.drain().await.deregistered);
}

#[tokio::test]
async fn a_pump_whose_sessions_are_blackholed_is_fenced_within_its_trust_and_open_again_after_it() {
    let (db, client) = database().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let proxy = Proxy::to(socket).await.unwrap();
    let url = format!("postgresql://postgres@{}/{}", proxy.address(), db.name());
    let mut options = quick();
    options.liveness.lock_loss_grace_seconds = 2;
    let mut bench = Bench::start(&url, options, Duration::from_secs(6)).await;
    let me = bench.pump.instance_id();
    let mut best = Duration::MAX;
    // A busy machine may be late by more than a little; not every time.
    for _ in 0..3 {
        until_declared(&client).await;
        store(&client, 1).await;
        assert!(bench.started.recv().await.is_some());
        sleep(Duration::from_secs(1)).await;
        assert!(bench.pump.is_ready());
        let cut = Instant::now();
        proxy.hold_all();
        while bench.pump.is_ready() {
            sleep(Duration::from_millis(1)).await;
        }
        let fenced = cut.elapsed();
        store(&client, 1).await;
        assert!(bench.done.recv().await.is_some(), "what ran goes on");
        eventually("the end of the fence", async || bench.pump.is_ready()).await;
        let open = cut.elapsed();
        assert!(bench.started.recv().await.is_some());
        assert!(bench.done.recv().await.is_some(), "and the pump goes on");
        println!("fenced after {fenced:?}, open after {open:?}, the next message after {:?}", cut.elapsed());
        best = best.min(fenced);
        if best <= Duration::from_millis(1_900) {
            break;
        }
    }
    // grace - min(1 s, 0.3 x grace) after the last ping that was sent before the cut.
    assert!(best <= Duration::from_millis(1_900), "{best:?}");
    eventually("an empty table", async || value::<i64>(&client, "select count(*) from wh_outbox").await == 0)
        .await;
    assert!(bench.pump.is_ready());
    assert_eq!((bench.pump.instance_id(), evictions(&client).await), (me, 0));
    bench.pump.drain().await;
}

#[derive(Deserialize)]
struct Charge;

/// Asks for a proof, waits to be let on, asks again.
struct Careful {
    first: UnboundedSender<Result<(), Untrusted>>,
    go: tokio::sync::watch::Receiver<bool>,
    second: UnboundedSender<Result<(), Untrusted>>,
}

impl Handler<Charge> for Careful {
    async fn handle(&self, cx: &mut Context<'_>, _: Charge) -> Result<(), Failure> {
        let _ = self.first.send(cx.ensure_trusted().await);
        let _ = self.go.clone().wait_for(|go| *go).await;
        let proof = cx.ensure_trusted().await;
        let _ = self.second.send(proof);
        proof?;
        Ok(())
    }
}

#[tokio::test]
async fn a_handler_that_asks_before_its_effect_learns_of_an_eviction_that_nobody_else_has_noticed() {
    let (db, client) = database().await;
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 3_600_000;
    options.claim.polling_max_interval_milliseconds = 3_600_000;
    let (first, mut told_first) = unbounded_channel();
    let (second, mut told_second) = unbounded_channel();
    let (go, gate) = tokio::sync::watch::channel(false);
    let handler = Careful { first, go: gate, second };
    let pump = WorkPump::builder(db.url()).options(options).handler("charge", handler).start().await.unwrap();
    let charge = NewInbox::new("charge", &());
    let _ = pump.producer().inbox(&client, &[charge]).await.unwrap();
    pump.wake();
    assert_eq!(told_first.recv().await.unwrap(), Ok(()));
    let evict = "select evict_instance($1, $2, 'by hand')";
    client.query_one(evict, &[&pump.instance_id(), &Uuid::now_v7()]).await.unwrap();
    go.send(true).unwrap();
    let answer = told_second.recv().await.unwrap();
    assert!(matches!(answer, Err(Untrusted::Evicted | Untrusted::LeaseOver)), "{answer:?}");
    pump.drain().await;
}
