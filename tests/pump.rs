//! The facade on a real server: what is stored is published or handled, in order, and what fails comes again.

mod common;

use std::collections::HashMap;

use serde_json::json;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use uuid::Uuid;
use workpump::{Failure, NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

/// Tells the test what was published.
struct Teller(UnboundedSender<OutboxMessage>);

impl Publisher for Teller {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        self.0.send(message.clone()).map_err(|_| Failure::retry("the test is over"))
    }
}

fn quick() -> Options {
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 20;
    options.claim.polling_max_interval_milliseconds = 100;
    options
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
