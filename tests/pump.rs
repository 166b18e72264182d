//! The facade on a real server: what is stored is published or handled, in order, and what fails comes again.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use common::quick;
use common::wait::eventually;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump::{
    Failure, NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, RequestImmediatePoll, WorkPump,
};

/// Tells the test what was published.
struct Teller(UnboundedSender<OutboxMessage>);

impl Publisher for Teller {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        self.0.send(message.clone()).map_err(|_| Failure::retry("the test is over"))
    }
}

#[tokio::test]
async fn what_commits_is_published_in_stream_order_by_several_pumps() {
    let database = common::database().await;
    let (streams, each) = (20_u128, 25_usize);
    let mut client = database.connect().await;
    let producer = Producer::new("public").unwrap();
    let (told, mut telling) = unbounded_channel();
    let mut pumps = Vec::new();
    for _ in 0..3 {
        let pump = WorkPump::builder(database.url())
            .options(quick())
            .publisher(Teller(told.clone()))
            .start()
            .await
            .unwrap();
        pumps.push(pump);
    }
    for position in 0..each {
        let transaction = client.transaction().await.unwrap();
        let batch: Vec<_> = (1..=streams)
            .map(|stream| {
                NewOutbox::new("step", &json!({ "position": position })).stream(Uuid::from_u128(stream))
            })
            .collect();
        assert_eq!(producer.outbox(&transaction, &batch).await.unwrap().new_messages(), batch.len());
        transaction.commit().await.unwrap();
        pumps[0].wake();
    }
    let mut seen: HashMap<Uuid, Vec<u64>> = HashMap::new();
    for _ in 0..streams as usize * each {
        let message = telling.recv().await.unwrap();
        let body: serde_json::Value = message.decode().unwrap();
        seen.entry(message.stream_id.unwrap()).or_default().push(body["position"].as_u64().unwrap());
        assert_eq!((message.attempts, message.claim_epoch), (1, 1));
    }
    for pump in pumps {
        pump.drain().await;
    }
    assert!(telling.try_recv().is_err(), "nothing is published twice");
    for (stream, positions) in seen {
        assert_eq!(positions, (0..each as u64).collect::<Vec<_>>(), "stream {stream}");
    }
    let status = workpump::status(database.url(), "public").await.unwrap();
    assert_eq!(status.categories.iter().map(workpump::CategoryStatus::depth).sum::<i64>(), 0);
    assert!(status.instances.is_empty(), "drained instances are no members: {:?}", status.instances);
}

#[tokio::test]
async fn a_request_for_an_immediate_poll_beats_any_interval() {
    let database = common::database().await;
    let client = database.connect().await;
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 3_600_000;
    options.claim.polling_max_interval_milliseconds = 3_600_000;
    let (told, mut telling) = unbounded_channel();
    let pump =
        WorkPump::builder(database.url()).options(options).publisher(Teller(told)).start().await.unwrap();
    let poll = pump.registry().recipient::<RequestImmediatePoll>().expect("somebody polls");
    for number in 0..3 {
        let message = NewOutbox::new("note", &number);
        let stored = pump.producer().outbox(&client, &[message]).await.unwrap();
        poll.send(RequestImmediatePoll).await.unwrap();
        assert_eq!(telling.recv().await.unwrap().message_id, stored.stored[0].message_id);
    }
    pump.drain().await;
}

#[tokio::test]
async fn a_scheduled_message_waits_for_its_time_and_its_stream_waits_with_it() {
    let database = common::database().await;
    let client = database.connect().await;
    let due: SystemTime =
        client.query_typed_one("select clock_timestamp() + interval '1 hour'", &[]).await.unwrap().get(0);
    let stream = Uuid::from_u128(5);
    let messages = [
        NewOutbox::new("later", &1).stream(stream).scheduled_for(due),
        NewOutbox::new("behind", &2).stream(stream),
        NewOutbox::new("free", &3),
    ];
    let _ = Producer::new("public").unwrap().outbox(&client, &messages).await.unwrap();
    let (told, mut telling) = unbounded_channel();
    let pump =
        WorkPump::builder(database.url()).options(quick()).publisher(Teller(told)).start().await.unwrap();
    assert_eq!(&*telling.recv().await.unwrap().message_type, "free");
    let sooner = "update wh_outbox set scheduled_for = clock_timestamp() + interval '1 second' where message_type = 'later' \
                  returning scheduled_for";
    let due: SystemTime = client.query_typed_one(sooner, &[]).await.unwrap().get(0);
    for expected in ["later", "behind"] {
        assert_eq!(&*telling.recv().await.unwrap().message_type, expected);
    }
    let now_due =
        client.query_typed_one("select clock_timestamp() >= $1", &[(&due, Type::TIMESTAMPTZ)]).await.unwrap();
    assert!(now_due.get::<_, bool>(0), "not before its time");
    pump.drain().await;
}

#[tokio::test]
async fn what_a_drain_did_not_start_is_free_at_once_and_was_not_charged() {
    let database = common::database().await;
    let client = database.connect().await;
    let messages: Vec<_> = (0..100).map(|n| NewOutbox::new("slow", &n).stream(Uuid::from_u128(9))).collect();
    let _ = Producer::new("public").unwrap().outbox(&client, &messages).await.unwrap();
    let (told, mut telling) = unbounded_channel();
    let (go, gate) = tokio::sync::watch::channel(false);
    let publisher = Gated { told, gate };
    let pump = WorkPump::builder(database.url()).options(quick()).publisher(publisher).start().await.unwrap();
    assert!(telling.recv().await.is_some(), "one is running, 99 wait behind it");
    let pump = Arc::new(pump);
    let draining = tokio::spawn({
        let pump = Arc::clone(&pump);
        async move { pump.drain().await }
    });
    eventually("nothing more is started", async || {
        pump.observe().await.iter().any(|actor| actor.name == "dispatch" && actor.state == "draining")
    })
    .await;
    go.send(true).unwrap();
    let report = draining.await.unwrap();
    let left = client
        .query_typed_one("select count(*), count(*) filter (where attempts = 0) from wh_outbox", &[])
        .await;
    let left = left.unwrap();
    assert_eq!((left.get::<_, i64>(0), left.get::<_, i64>(1)), (99, 99), "{report:?}");
}

/// Publishes once the gate is open.
struct Gated {
    told: UnboundedSender<Uuid>,
    gate: tokio::sync::watch::Receiver<bool>,
}

impl Publisher for Gated {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let _ = self.told.send(message.message_id);
        let _ = self.gate.clone().wait_for(|open| *open).await;
        Ok(())
    }
}
