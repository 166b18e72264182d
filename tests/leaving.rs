//! An instance that leaves in good order: others go on with its streams at once, and nothing is charged for it.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;

use std::time::Duration;

use common::{quick, scale};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump::{NewOutbox, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

/// What one message takes.
const WORK: Duration = Duration::from_millis(50);
const STREAMS: usize = 10;
const EACH: usize = 40;

struct Tell(UnboundedSender<(Uuid, u32, Instant)>);

impl Publisher for Tell {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let _ = self.0.send((message.message_id, message.attempts, Instant::now()));
        sleep(WORK).await;
        Ok(())
    }
}

async fn start(url: &str) -> (WorkPump, UnboundedReceiver<(Uuid, u32, Instant)>) {
    let (told, begun) = unbounded_channel();
    let pump =
        WorkPump::builder(url).options(quick()).publisher(Tell(told)).start().await.expect("it starts");
    (pump, begun)
}

/// Drains an instance in the middle of ten streams. How soon another one begins with the first of the rows it handed back.
async fn leave_in_the_middle() -> Duration {
    let db = common::database().await;
    let client = db.connect().await;
    let (leaver, mut before) = start(db.url()).await;
    let streams: Vec<Uuid> = (0..STREAMS).map(|_| Uuid::now_v7()).collect();
    let messages: Vec<_> = (0..STREAMS * EACH)
        .map(|number| NewOutbox::new("note", &number).stream(streams[number % STREAMS]))
        .collect();
    let _ = Producer::new("public").expect("a schema").outbox(&client, &messages).await.expect("stored");
    leaver.wake();
    let (peer, mut after) = start(db.url()).await;
    // All streams are in its hands, and each is being worked on.
    let mut first = 0;
    while first < 3 * STREAMS {
        before.recv().await.expect("a message");
        first += 1;
    }
    let began = Instant::now();
    let report = leaver.drain().await;
    let left = began.elapsed();
    assert!(report.deregistered && report.abandoned == 0 && report.released > 0, "{report:?}");
    // The peer may have got a stream of its own before; what counts is what the leaver had.
    let mut taken = Duration::MAX;
    let mut ids = Vec::new();
    while let Ok((id, attempts, _)) = before.try_recv() {
        assert_eq!(attempts, 1);
        ids.push(id);
    }
    let of_leaver = first + ids.len();
    for _ in of_leaver..STREAMS * EACH {
        let (id, attempts, at) = after.recv().await.expect("a message");
        assert_eq!(attempts, 1, "what was handed back was not charged");
        if at >= began {
            taken = taken.min(at - began);
        }
        ids.push(id);
    }
    println!(
        "left after {left:.0?}, {} rows handed back, the first of them begun after {taken:.0?}",
        report.released
    );
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "each once");
    assert!(peer.drain().await.deregistered);
    taken
}

#[tokio::test]
async fn others_go_on_at_once_with_the_streams_of_an_instance_that_leaves() {
    let mut took = Vec::new();
    for _ in 0..(2 * scale()).min(20) {
        took.push(leave_in_the_middle().await);
    }
    took.sort_unstable();
    let (median, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("graceful shutdown: {} runs, median {median:.0?}, worst {worst:.0?}", took.len());
    // "At once" on a machine that does other things besides; a lease that had to end would be minutes.
    assert!(median <= Duration::from_secs(3), "{took:?}");
}
