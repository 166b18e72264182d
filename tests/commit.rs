//! Committing through the pump: what is committed starts at once, and what is not is never called committed.

mod common;

use std::sync::Arc;

use common::wait::{PATIENCE, eventually};
use common::{Bouncer, Database};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{
    CommitError, Enqueued, Failure, NewInbox, NewOutbox, Options, OutboxMessage, Outcome, Producer,
    Publisher, WorkPump,
};

/// Tells the test what was published.
struct Teller(UnboundedSender<OutboxMessage>);

impl Publisher for Teller {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        self.0.send(message.clone()).map_err(|_| Failure::retry("the test is over"))
    }
}

/// Polls every hour: what starts, started because somebody was woken.
fn sleepy() -> Options {
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 3_600_000;
    options.claim.polling_max_interval_milliseconds = 3_600_000;
    options
}

/// A pump for the outbox that nothing wakes but itself.
struct Lab {
    database: Database,
    pump: Arc<WorkPump>,
    published: UnboundedReceiver<OutboxMessage>,
    producer: Producer,
}

impl Lab {
    async fn new() -> Self {
        let database = common::database().await;
        let url = database.url().to_owned();
        Self::at(database, &url).await
    }

    async fn at(database: Database, url: &str) -> Self {
        let (told, published) = unbounded_channel();
        let pump = WorkPump::builder(url)
            .options(sleepy())
            .publisher(Teller(told))
            .start()
            .await
            .expect("it starts");
        Self {
            database,
            pump: Arc::new(pump),
            published,
            producer: Producer::new("public").expect("a schema name"),
        }
    }

    /// A session in which nothing rings the doorbell: the trigger that does is switched off.
    async fn quiet_client(&self) -> Client {
        let client = self.database.connect().await;
        client.batch_execute("set session_replication_role = replica").await.expect("an answer");
        client
    }

    async fn claims(&self) -> u64 {
        let accounts = self.pump.observe().await;
        accounts.iter().find(|account| account.name == "claim").expect("a claimer").counter("claims")
    }

    /// Holds that this wakes nobody: no claim during many round trips to the database and to the claimer. A claim that had another reason,
    /// such as a lock that was gained, gets another try.
    async fn wakes_nobody(&self, what: &str, mut commit: impl AsyncFnMut()) {
        let client = self.database.connect().await;
        'again: for _ in 0..20 {
            let before = self.claims().await;
            commit().await;
            for _ in 0..100 {
                client.batch_execute("select 1").await.expect("an answer");
                if self.claims().await != before {
                    continue 'again;
                }
            }
            return;
        }
        panic!("{what} wakes the pump each time");
    }

    /// The next message that is published; if none comes, what everybody says.
    async fn next(&mut self) -> Uuid {
        if let Ok(message) = timeout(PATIENCE, self.published.recv()).await {
            return message.expect("a publisher").message_id;
        }
        let client = self.database.connect().await;
        let rows = "select string_agg(to_jsonb(o)::text, E'\\n') from (select * from wh_outbox limit 20) o";
        let rows: Option<String> = client.query_typed_one(rows, &[]).await.expect("an answer").get(0);
        panic!("nothing is published: {:#?}\n{}", self.pump.observe().await, rows.unwrap_or_default());
    }

    async fn rows(&self, table: &str) -> i64 {
        let client = self.database.connect().await;
        client.query_typed_one(&format!("select count(*) from {table}"), &[]).await.expect("an answer").get(0)
    }
}

fn sendable<T: Send>(value: T) -> T {
    value
}

#[tokio::test]
async fn what_is_committed_through_the_pump_starts_without_any_poll() {
    let mut lab = Lab::new().await;
    let mut client = lab.quiet_client().await;
    for number in 0..20 {
        let transaction = client.transaction().await.unwrap();
        let enqueued = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &number)]).await.unwrap();
        let id = enqueued.stored[0].message_id;
        sendable(lab.pump.commit(transaction, enqueued)).await.unwrap();
        assert_eq!(lab.next().await, id);
    }
    lab.pump.drain().await;
}

#[tokio::test]
async fn the_same_through_a_transaction_mode_pooler() {
    let database = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    let url = bouncer.url(database.name());
    let mut lab = Lab::at(database, &url).await;
    let mut client = common::connect(&url).await;
    for number in 0..20 {
        let transaction = client.transaction().await.unwrap();
        let enqueued = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &number)]).await.unwrap();
        lab.pump.commit(transaction, &enqueued).await.unwrap();
        assert_eq!(lab.next().await, enqueued.stored[0].message_id);
    }
    lab.pump.drain().await;
}

#[tokio::test]
async fn several_batches_of_one_transaction_add_up_and_one_of_them_is_enough() {
    let mut lab = Lab::new().await;
    let mut client = lab.quiet_client().await;
    let transaction = client.transaction().await.unwrap();
    let mut all = lab.producer.inbox(&transaction, &[NewInbox::new("order", &1)]).await.unwrap();
    all += lab.producer.outbox(&transaction, &[NewOutbox::new("first", &1)]).await.unwrap();
    let more = lab.producer.inbox(&transaction, &[NewInbox::new("order", &2)]).await.unwrap();
    lab.pump.commit(transaction, all + more).await.unwrap();
    assert_eq!(&*lab.published.recv().await.unwrap().message_type, "first");
    let stored = lab.producer.outbox(&client, &[NewOutbox::new("second", &1)]).await.unwrap();
    assert!(lab.pump.committed(&stored), "committed in another way");
    assert_eq!(&*lab.published.recv().await.unwrap().message_type, "second");
    lab.pump.drain().await;
}

#[tokio::test]
async fn nobody_is_woken_for_what_others_run_and_for_what_was_known() {
    let mut lab = Lab::new().await;
    let mut client = lab.quiet_client().await;
    lab.wakes_nobody("an inbox message", async || {
        let transaction = client.transaction().await.unwrap();
        let enqueued = lab.producer.inbox(&transaction, &[NewInbox::new("order", &1)]).await.unwrap();
        assert_eq!(enqueued.new_messages(), 1);
        lab.pump.commit(transaction, enqueued).await.unwrap();
    })
    .await;
    let message = NewOutbox::new("note", &1);
    let enqueued = lab.producer.outbox(&client, std::slice::from_ref(&message)).await.unwrap();
    assert!(lab.pump.committed(enqueued));
    assert_eq!(lab.next().await, message.message_id());
    let kept = NewOutbox::new("kept", &1).scheduled_for(far(&client).await);
    let _ = lab.producer.outbox(&client, std::slice::from_ref(&kept)).await.unwrap();
    lab.wakes_nobody("a message that is known", async || {
        let transaction = client.transaction().await.unwrap();
        let enqueued = lab.producer.outbox(&transaction, std::slice::from_ref(&kept)).await.unwrap();
        assert_eq!((enqueued.stored.len(), enqueued.new_messages()), (1, 0));
        lab.pump.commit(transaction, enqueued).await.unwrap();
    })
    .await;
    lab.wakes_nobody("an empty transaction", async || {
        let transaction = client.transaction().await.unwrap();
        lab.pump.commit(transaction, Enqueued::default()).await.unwrap();
    })
    .await;
    lab.pump.drain().await;
}

async fn far(client: &Client) -> std::time::SystemTime {
    client
        .query_typed_one("select clock_timestamp() + interval '1 day'", &[])
        .await
        .expect("an answer")
        .get(0)
}

#[tokio::test]
async fn a_commit_that_fails_is_an_error_with_its_code_and_wakes_nobody() {
    let lab = Lab::new().await;
    let mut client = lab.database.connect().await;
    let table =
        "create table orders (id int unique deferrable initially deferred); insert into orders values (1)";
    client.batch_execute(table).await.unwrap();
    lab.wakes_nobody("a commit that fails", async || {
        let transaction = client.transaction().await.unwrap();
        transaction.batch_execute("insert into orders values (1)").await.unwrap();
        let enqueued = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &1)]).await.unwrap();
        let error = lab.pump.commit(transaction, enqueued).await.unwrap_err();
        assert!(matches!(&error, CommitError::RolledBack { code, .. } if code == "23505"), "{error}");
        assert!(error.to_string().starts_with("the transaction was not committed (23505): "), "{error}");
    })
    .await;
    assert_eq!(lab.rows("wh_outbox").await, 0);
    lab.pump.drain().await;
}

#[tokio::test]
async fn a_transaction_in_which_a_statement_had_failed_is_not_called_committed() {
    let lab = Lab::new().await;
    let mut client = lab.database.connect().await;
    lab.wakes_nobody("an aborted transaction", async || {
        let transaction = client.transaction().await.unwrap();
        let enqueued = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &1)]).await.unwrap();
        assert!(transaction.batch_execute("select 1 / 0").await.is_err(), "and nobody looks");
        let error = lab.pump.commit(transaction, enqueued).await.unwrap_err();
        assert!(matches!(&error, CommitError::RolledBack { code, .. } if code == "25P02"), "{error}");
    })
    .await;
    // The session is in order afterwards, and the driver alone would have said nothing.
    let transaction = client.transaction().await.unwrap();
    let _ = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &1)]).await.unwrap();
    assert!(transaction.batch_execute("select 1 / 0").await.is_err());
    transaction.commit().await.expect("this is why");
    assert_eq!(lab.rows("wh_outbox").await, 0);
    lab.pump.drain().await;
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_unknown_and_the_pump_looks() {
    let lab = Lab::new().await;
    let mut client = lab.database.connect().await;
    let trap = "create table trap (id int);
        create function spring() returns trigger language plpgsql as $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
        create constraint trigger spring after insert on trap deferrable initially deferred for each row execute function spring()";
    client.batch_execute(trap).await.unwrap();
    let before = lab.claims().await;
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("insert into trap values (1)").await.unwrap();
    let enqueued = lab.producer.outbox(&transaction, &[NewOutbox::new("note", &1)]).await.unwrap();
    let error = lab.pump.commit(transaction, &enqueued).await.unwrap_err();
    assert!(matches!(error, CommitError::Unknown { .. }), "{error}");
    eventually("the pump looks", async || lab.claims().await > before).await;

    // This one is known: the session had ended before, so no commit was sent.
    eventually("the driver knows of the end", async || client.is_closed()).await;
    let error = match client.transaction().await {
        Ok(transaction) => lab.pump.commit(transaction, &enqueued).await.unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    assert!(!error.is_empty());
    lab.pump.drain().await;
}

/// What a random transaction does at its end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Commit,
    Broken,
    Known,
    Rollback,
}

#[tokio::test]
async fn of_many_random_transactions_exactly_the_committed_ones_run_and_none_waits_for_a_poll() {
    let seed = rand::random::<u64>();
    eprintln!("seed {seed}");
    let rounds = 50 * common::scale() as usize;
    let mut lab = Lab::new().await;
    let mut sessions = Vec::new();
    for session in 0..8_u64 {
        let (client, pump, producer) =
            (lab.quiet_client().await, Arc::clone(&lab.pump), lab.producer.clone());
        let rng = StdRng::seed_from_u64(seed ^ session);
        sessions.push(tokio::spawn(session_of(client, pump, producer, rng, rounds)));
    }
    let mut committed = Vec::new();
    for session in sessions {
        committed.extend(session.await.unwrap());
    }
    let mut published = Vec::new();
    while published.len() < committed.len() {
        published.push(lab.next().await);
    }
    committed.sort_unstable();
    published.sort_unstable();
    assert_eq!(published, committed);
    lab.pump.drain().await;
    assert!(lab.published.try_recv().is_err(), "nothing that was not committed");
}

async fn session_of(
    mut client: Client,
    pump: Arc<WorkPump>,
    producer: Producer,
    mut rng: StdRng,
    rounds: usize,
) -> Vec<Uuid> {
    let mut committed = Vec::new();
    let ends = [End::Commit, End::Commit, End::Broken, End::Known, End::Rollback];
    for round in 0..rounds {
        let end = *ends.choose(&mut rng).expect("some end");
        let transaction = client.transaction().await.expect("a transaction");
        let mut all = Enqueued::default();
        for _ in 0..rng.random_range(1..=3) {
            let batch: Vec<_> = (0..rng.random_range(0..=3)).map(|n| NewOutbox::new("note", &n)).collect();
            all += producer.outbox(&transaction, &batch).await.expect("stored");
        }
        let ids: Vec<_> = all.stored.iter().map(|stored| stored.message_id).collect();
        match end {
            End::Broken => assert!(transaction.batch_execute("select 1 / 0").await.is_err()),
            End::Known => {
                let again: Vec<_> = ids.iter().map(|id| NewOutbox::new("note", &round).id(*id)).collect();
                let again = producer.outbox(&transaction, &again).await.expect("stored");
                assert_eq!(again.new_messages(), 0);
                all += again;
            }
            End::Commit | End::Rollback => {}
        }
        if end == End::Rollback {
            transaction.rollback().await.expect("rolled back");
        } else {
            let answer = pump.commit(transaction, all).await;
            assert_eq!(answer.is_ok(), end != End::Broken, "{answer:?}");
            if answer.is_ok() {
                committed.extend(ids);
            }
        }
    }
    committed
}
