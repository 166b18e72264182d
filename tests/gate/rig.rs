//! A pump that tells what it publishes and how its gate stands.
#![allow(dead_code, unreachable_pub, reason = "each module uses its own part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;
use tokio_postgres::types::FromSqlOwned;
use workpump::engine::instance::Gate;
use workpump::engine::message::SubscribeToGate;
use workpump::supervision::Spec;
use workpump::{
    Account, GateChanged, NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, WorkPump,
};

use crate::common::proxy::Proxy;
use crate::common::wait::PATIENCE;
use crate::common::{self, Database};

/// An hour: whoever waits for a poll of these options has lost the test.
const NEVER: u64 = 3_600_000;

/// Nobody polls. Proofs are made every second and may take two.
pub fn woken_only() -> Options {
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = NEVER;
    options.claim.polling_max_interval_milliseconds = NEVER;
    options.claim.notify_healthy_polling_interval_milliseconds = Some(NEVER);
    options.gate.probe_interval_seconds = 1;
    options.gate.probe_timeout_seconds = 2;
    options.gate.reconnect_max_seconds = 1;
    options
}

/// Without a gate work is looked for every 100 ms, with one never.
pub fn tight_without_gate() -> Options {
    let mut options = woken_only();
    options.claim.polling_interval_milliseconds = 100;
    options
}

/// One value.
pub async fn value<T: FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_typed_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

/// A door to the shared server.
pub async fn door() -> Proxy {
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    Proxy::to(socket).await.expect("a door")
}

/// The address of a database through a door.
pub fn through(proxy: &Proxy, db: &Database) -> String {
    format!("postgresql://postgres@{}/{}", proxy.address(), db.name())
}

/// Publishes after a pause; counts how many do so at once.
#[derive(Clone)]
pub struct Slow {
    pause: Duration,
    told: UnboundedSender<OutboxMessage>,
    pub running: Arc<AtomicUsize>,
}

impl Publisher for Slow {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        self.running.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(self.pause).await;
        self.running.fetch_sub(1, Ordering::Relaxed);
        // The test may be over.
        let _ = self.told.send(message.clone());
        Ok(())
    }
}

/// A user's actor that hears of the gate.
struct Ear(UnboundedSender<Gate>);

impl Actor for Ear {
    type Context = Context<Self>;
}

impl Handler<GateChanged> for Ear {
    type Result = ();
    fn handle(&mut self, changed: GateChanged, _: &mut Self::Context) {
        let _ = self.0.send(changed.0);
    }
}

pub struct Rig {
    pub pump: WorkPump,
    pub running: Arc<AtomicUsize>,
    pub published: UnboundedReceiver<OutboxMessage>,
    heard: UnboundedReceiver<Gate>,
    /// As it was last told.
    pub gate: Option<Gate>,
}

impl Rig {
    /// A pump with a publisher that takes no time.
    pub async fn start(url: &str, direct_url: &str, options: Options) -> Self {
        Self::slow(url, direct_url, options, Duration::ZERO).await
    }

    pub async fn slow(url: &str, direct_url: &str, options: Options, pause: Duration) -> Self {
        let (told, published) = unbounded_channel();
        let (ears, heard) = unbounded_channel();
        let ear = Spec::new("ear", move |cx| {
            let gate = cx.registry().recipient::<SubscribeToGate>().expect("a child of the pump");
            gate.do_send(SubscribeToGate(cx.addr().recipient()));
            Ear(ears.clone())
        });
        let slow = Slow { pause, told, running: Arc::default() };
        let running = Arc::clone(&slow.running);
        let builder = WorkPump::builder(url).direct_url(direct_url).options(options);
        let pump = builder.publisher(slow).supervise(ear).start().await.expect("it starts");
        Self { pump, running, published, heard, gate: None }
    }

    /// The next change, which has to be one.
    pub async fn change(&mut self) -> Gate {
        let next =
            timeout(PATIENCE, self.heard.recv()).await.expect("a change of the gate").expect("the ear lives");
        assert_ne!(Some(next), self.gate, "a change is told once");
        self.gate = Some(next);
        next
    }

    /// Waits until the gate stands so; how many changes that took.
    pub async fn until(&mut self, gate: Gate) -> usize {
        let mut changes = 0;
        while self.gate != Some(gate) {
            self.change().await;
            changes += 1;
        }
        changes
    }

    /// Waits for the next loss and for its end.
    pub async fn lost_and_back(&mut self) {
        assert_eq!(self.gate, Some(Gate::Available));
        assert_eq!(self.change().await, Gate::Unavailable);
        assert_eq!(self.change().await, Gate::Available);
    }

    /// Nothing has been told that was not looked at.
    pub fn nothing_more_was_told(&mut self) {
        let more = self.heard.try_recv();
        assert!(more.is_err(), "{more:?} after {:?}", self.gate);
    }

    /// Stores a row and waits until it is published; how long that took.
    pub async fn relay_one(&mut self, client: &Client) -> Duration {
        let start = Instant::now();
        store(client, 1).await;
        self.published().await;
        start.elapsed()
    }

    pub async fn published(&mut self) -> OutboxMessage {
        let Ok(message) = timeout(PATIENCE, self.published.recv()).await else {
            panic!("nobody was woken: {:?}, {:#?}", self.pump.gate(), self.pump.observe().await)
        };
        message.expect("the pump lives")
    }

    /// What an actor says of itself.
    pub async fn account(&self, name: &str) -> Account {
        let accounts = self.pump.observe().await;
        accounts.into_iter().find(|account| account.name == name).expect("an actor of this name")
    }

    /// Kills the session that holds the alive-lock, which is the one that listens.
    pub async fn kill_listener(&self, control: &Client) {
        let kill = format!("select count(pg_terminate_backend(pid, 60000)) from ({}) l", self.listener());
        assert_eq!(value::<i64>(control, &kill).await, 1);
    }

    /// The session that holds the alive-lock, as a query for its `pid`.
    pub fn listener(&self) -> String {
        format!(
            "select pid from pg_locks where locktype = 'advisory' and granted and mode = 'ExclusiveLock' and objsubid = 1 \
             and database = (select oid from pg_database where datname = current_database()) \
             and (classid::bigint << 32) | objid::bigint = wh_alive_key('{}')",
            self.pump.instance_id()
        )
    }
}

/// Stores so many rows without a stream.
pub async fn store(client: &Client, count: usize) {
    let messages: Vec<_> = (0..count).map(|number| NewOutbox::new("note", &number)).collect();
    let producer = Producer::new("public").expect("a schema name");
    let stored = producer.outbox(client, &messages).await.expect("stored");
    assert_eq!(stored.new_messages(), count);
}
