//! Publishers on a real server know as much of their leases as handlers do.

mod common;

use std::time::Duration;

use common::wait::{PATIENCE, eventually};
use common::{Database, quick};
use tokio::sync::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{
    ExtendError, Failure, NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, Untrusted,
    WorkPump,
};

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Started { number: u64, attempts: u32 },
    Extended(Result<(), ExtendError>),
    Trusted(Result<(), Untrusted>),
    Cancelled,
}

/// What the publisher does next with the message in its hands.
#[derive(Debug)]
enum Do {
    Extend,
    Prove,
    AwaitTheEnd,
    Finish,
}

/// Does what it is told.
struct Puppet {
    told: UnboundedSender<Event>,
    strings: Mutex<UnboundedReceiver<Do>>,
    batch: usize,
}

impl Publisher for Puppet {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let tell = |event| drop(self.told.send(event));
        tell(Event::Started { number: message.decode()?, attempts: message.attempts });
        let mut strings = self.strings.lock().await;
        loop {
            match strings.recv().await.ok_or_else(|| Failure::retry("the test is over"))? {
                Do::Extend => {
                    let before = message.deadline();
                    let answer = message.extend().await;
                    if let Ok(deadline) = answer {
                        assert!(before < deadline);
                        // Two clocks are read for each answer, so not to the nanosecond.
                        let (first, second) =
                            (deadline.min(message.deadline()), deadline.max(message.deadline()));
                        assert!(second - first < Duration::from_secs(5), "{:?}", second - first);
                    }
                    tell(Event::Extended(answer.map(drop)));
                }
                Do::Prove => tell(Event::Trusted(message.ensure_trusted().await)),
                Do::AwaitTheEnd => {
                    message.cancel.cancelled().await;
                    tell(Event::Cancelled);
                }
                Do::Finish => return Ok(()),
            }
        }
    }

    fn max_batch(&self) -> usize {
        self.batch
    }
}

struct Lab {
    client: Client,
    pump: WorkPump,
    told: UnboundedReceiver<Event>,
    strings: UnboundedSender<Do>,
    _database: Database,
}

impl Lab {
    /// A pump, and so many messages of one stream.
    async fn new(options: Options, batch: usize, messages: u64) -> Self {
        let database = common::database().await;
        let client = database.connect().await;
        let messages: Vec<_> =
            (0..messages).map(|number| NewOutbox::new("note", &number).stream(Uuid::from_u128(4))).collect();
        let _ =
            Producer::new("public").expect("a schema name").outbox(&client, &messages).await.expect("stored");
        let (telling, told) = unbounded_channel();
        let (strings, pulled) = unbounded_channel();
        let puppet = Puppet { told: telling, strings: Mutex::new(pulled), batch };
        let pump = WorkPump::builder(database.url())
            .options(options)
            .publisher(puppet)
            .start()
            .await
            .expect("it starts");
        Self { client, pump, told, strings, _database: database }
    }

    async fn next(&mut self) -> Event {
        timeout(PATIENCE, self.told.recv()).await.expect("in time").expect("a publisher")
    }

    async fn pull(&mut self, string: Do) -> Event {
        self.strings.send(string).expect("a puppet");
        self.next().await
    }

    fn finish(&self) {
        self.strings.send(Do::Finish).expect("a puppet");
    }

    async fn until(&self, condition: &str) {
        let holds =
            async || self.client.query_typed_one(condition, &[]).await.expect("an answer").get::<_, bool>(0);
        eventually(condition, holds).await;
    }
}

/// A lease that a busy machine does not reach the end of.
fn roomy(max_renewals: u32) -> Options {
    let mut options = quick();
    options.claim.lease_seconds = 60;
    options.lease_renewal.lease_grace_seconds = 20;
    options.lease_renewal.coalesce_window_milliseconds = 10;
    options.lease_renewal.max_renewals_per_work = max_renewals;
    options
}

#[tokio::test]
async fn a_publisher_extends_its_lease_up_to_the_cap_and_proves_its_membership() {
    let mut lab = Lab::new(roomy(2), 1, 1).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Ok(())));
    assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Ok(())));
    assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Err(ExtendError::AtCap { renewals: 2 })));
    assert_eq!(lab.pull(Do::Prove).await, Event::Trusted(Ok(())), "the lease goes on until its deadline");
    lab.finish();
    lab.until("select count(*) = 0 from wh_outbox").await;
    lab.pump.drain().await;
}

#[tokio::test]
async fn each_message_of_a_batch_has_a_lease_of_its_own() {
    let mut lab = Lab::new(roomy(1), 10, 3).await;
    for number in 0..3 {
        assert_eq!(lab.next().await, Event::Started { number, attempts: 1 });
        assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Ok(())), "one renewal each");
        assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Err(ExtendError::AtCap { renewals: 1 })));
        lab.finish();
    }
    lab.until("select count(*) = 0 from wh_outbox").await;
    lab.pump.drain().await;
}

#[tokio::test]
async fn a_publisher_whose_row_was_stolen_learns_it_by_extending_and_is_not_trusted_with_it() {
    let mut lab = Lab::new(roomy(5), 1, 1).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    let theft = "with stolen as (update wh_outbox set claim_epoch = claim_epoch + 1, instance_id = gen_random_uuid(), \
                 lease_expiry = clock_timestamp() + interval '1 hour' returning 1) select count(*) from stolen";
    assert_eq!(lab.client.query_typed_one(theft, &[]).await.unwrap().get::<_, i64>(0), 1);
    assert_eq!(lab.pull(Do::Prove).await, Event::Trusted(Ok(())), "a beat proves the member, not the row");
    assert_eq!(lab.pull(Do::Extend).await, Event::Extended(Err(ExtendError::Lost)));
    assert_eq!(lab.pull(Do::AwaitTheEnd).await, Event::Cancelled);
    assert_eq!(lab.pull(Do::Prove).await, Event::Trusted(Err(Untrusted::LeaseOver)));
    lab.finish();
    lab.until("select count(*) = 1 and max(claim_epoch) = 2 from wh_outbox").await;
    lab.pump.drain().await;
}

#[tokio::test]
async fn a_publisher_of_an_evicted_instance_is_not_trusted() {
    let mut lab = Lab::new(roomy(5), 1, 1).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    let evict = "select evict_instance($1, $2, 'by hand')";
    let evicted = lab.client.query_one(evict, &[&lab.pump.instance_id(), &Uuid::now_v7()]).await.unwrap();
    assert!(evicted.get::<_, bool>(0));
    let Event::Trusted(Err(error)) = lab.pull(Do::Prove).await else { panic!("it was evicted") };
    assert!(matches!(error, Untrusted::Evicted | Untrusted::LeaseOver), "{error}");
    lab.finish();
    // The next life gets the row as soon as it is handed back.
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 2 });
    lab.finish();
    lab.until("select count(*) = 0 from wh_outbox").await;
    lab.pump.drain().await;
}

#[tokio::test]
async fn a_message_made_by_a_test_answers_as_one_with_a_lease_does() {
    let mut message = OutboxMessage::for_test("note", &7);
    message.destination = Some("orders".into());
    assert_eq!((message.decode::<u64>().unwrap(), message.attempts), (7, 1));
    let deadline = message.deadline();
    assert!(message.extend().await.unwrap() >= deadline);
    assert_eq!((message.ensure_trusted().await, message.trusted_until()), (Ok(()), None));
    message.cancel.cancel();
    assert_eq!(message.extend().await, Err(ExtendError::Lost));
    assert_eq!(message.ensure_trusted().await, Err(Untrusted::LeaseOver));
}
