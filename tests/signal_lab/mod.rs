//! What the tests of signals share: pumps on one database, and short ways to send and to hear.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of these helpers")]

use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_postgres::Client;
use workpump::signals::{Signal, Signals, Topic};
use workpump::{OutboxMessage, Outcome, Producer, Publisher, WorkPump};

use crate::common::wait::PATIENCE;
use crate::common::{self, Database, quick};

/// Publishes nothing that any of these tests looks at.
pub struct Nowhere;

impl Publisher for Nowhere {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        Ok(())
    }
}

/// A database, somebody who sends, and as many pumps as a test wants.
pub struct Lab {
    pub database: Database,
    pub client: Client,
    pub producer: Producer,
}

impl Lab {
    pub async fn new() -> Self {
        let database = common::database().await;
        let client = database.connect().await;
        Self { database, client, producer: Producer::new("public").expect("a schema name") }
    }

    pub async fn pump(&self) -> WorkPump {
        pump(self.database.url(), "public").await
    }

    pub async fn signal<T: serde::Serialize>(&self, topic: &Topic<T>, value: &T) {
        self.producer.signal(&self.client, topic, value).await.expect("sent");
    }

    pub async fn value<T: tokio_postgres::types::FromSqlOwned>(&self, sql: &str) -> T {
        self.client.query_typed_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
    }

    /// Kills the direct session of the only member; false while it has none.
    pub async fn kill_direct_session(&self) -> bool {
        let kill = "select count(pg_terminate_backend(l.pid)) from pg_locks l, wh_service_instances m \
                    where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 1 \
                    and (l.classid::bigint << 32) | l.objid::bigint = wh_alive_key(m.instance_id)";
        self.value::<i64>(kill).await == 1
    }
}

pub async fn pump(url: &str, schema: &str) -> WorkPump {
    WorkPump::builder(url)
        .schema(schema)
        .options(quick())
        .publisher(Nowhere)
        .start()
        .await
        .expect("it starts")
}

pub fn topic<T>(name: &str) -> Topic<T> {
    Topic::new(name).expect("a topic")
}

pub async fn next<T: DeserializeOwned>(signals: &mut Signals<T>) -> Signal<T> {
    timeout(PATIENCE, signals.recv()).await.expect("a signal in time").expect("the pump goes on")
}

/// The next value, whatever else is told before.
pub async fn next_value<T: DeserializeOwned>(signals: &mut Signals<T>) -> T {
    loop {
        if let Signal::Value(value) = next(signals).await {
            return value;
        }
    }
}

/// A subscription that is listened to.
pub async fn listening<T: DeserializeOwned + PartialEq + std::fmt::Debug>(
    pump: &WorkPump,
    topic: &Topic<T>,
) -> Signals<T> {
    let mut signals = pump.subscribe(topic);
    assert_eq!(next(&mut signals).await, Signal::Listening);
    signals
}

pub async fn gate(pump: &WorkPump, counter: &str) -> u64 {
    let accounts = pump.observe().await;
    accounts.iter().find(|account| account.name == "notify_gate").expect("a gate").counter(counter)
}
