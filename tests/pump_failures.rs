//! What fails comes again, what cannot succeed is given up whole, and what cannot start says why.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::wait::{PATIENCE, eventually};
use common::{Bouncer, quick};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump::engine::options::OnEvicted;
use workpump::{
    Context, Error, Failure, Handler, NewInbox, NewOutbox, Options, OutboxMessage, Outcome, Producer,
    Publisher, WorkPump,
};

#[derive(Debug, Serialize, Deserialize)]
struct Step {
    number: u64,
    fate: String,
}

/// Does what the message says, and tells the test.
struct Fated(UnboundedSender<(u64, u32)>);

impl Handler<Step> for Fated {
    async fn handle(&self, cx: &mut Context<'_>, step: Step) -> Result<(), Failure> {
        let _ = self.0.send((step.number, cx.attempts()));
        match step.fate.as_str() {
            "retry" if cx.attempts() < 3 => Err(Failure::retry_after(Duration::from_millis(1), "not yet")),
            "permanent" => Err(Failure::permanent("never")),
            "panic" => panic!("the handler broke on {}", step.number),
            "error" => Err("no number".parse::<u64>().expect_err("no number").into()),
            _ => Ok(()),
        }
    }
}

fn fated() -> (Fated, UnboundedReceiver<(u64, u32)>) {
    let (told, telling) = unbounded_channel();
    (Fated(told), telling)
}

fn step(number: u64, fate: &str) -> NewInbox {
    NewInbox::new("step", &Step { number, fate: fate.to_owned() })
}

async fn store(client: &Client, messages: &[NewInbox]) {
    let producer = Producer::new("public").expect("a schema name");
    let stored = producer.inbox(client, messages).await.expect("stored");
    assert_eq!(stored.new_messages(), messages.len());
}

/// Waits until a query says true.
async fn until(client: &Client, condition: &str) {
    let holds = async || client.query_typed_one(condition, &[]).await.expect("a condition").get::<_, bool>(0);
    eventually(condition, holds).await;
}

#[tokio::test]
async fn a_failed_row_comes_again_before_the_rest_of_its_stream() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, mut told) = fated();
    let stream = Uuid::from_u128(7);
    store(&client, &[step(1, "retry").stream(stream), step(2, "ok").stream(stream), step(3, "ok")]).await;
    let pump =
        WorkPump::builder(database.url()).options(quick()).handler("step", handler).start().await.unwrap();
    let mut ordered = Vec::new();
    while ordered.len() < 4 {
        let seen = told.recv().await.unwrap();
        if seen.0 != 3 {
            ordered.push(seen);
        }
    }
    assert_eq!(ordered, [(1, 1), (1, 2), (1, 3), (2, 1)], "in order, and the waiting row was never charged");
    pump.drain().await;
    until(&client, "select count(*) = 0 from wh_inbox").await;
}

#[tokio::test]
async fn a_panic_an_error_and_an_undecodable_body_are_failed_attempts_with_their_reason() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, _told) = fated();
    let strange = NewInbox::new("step", &json!({ "number": "one" }));
    let unknown = NewInbox::new("leap", &json!({}));
    store(&client, &[step(1, "panic"), step(2, "error"), strange, unknown]).await;
    // None comes again before all four have been looked at.
    let mut options = quick();
    options.dispatch.retry_base_seconds = 300;
    let pump =
        WorkPump::builder(database.url()).options(options).handler("step", handler).start().await.unwrap();
    until(&client, "select count(*) = 4 from wh_inbox where error is not null and instance_id is null").await;
    let rows = client
        .query_typed("select failure_reason, error, attempts from wh_inbox order by seq", &[])
        .await
        .unwrap();
    let failures: Vec<(i32, String, i32)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert!(failures.iter().all(|(_, _, attempts)| *attempts == 1), "{failures:?}");
    assert!(failures[0].0 == 20 && failures[0].1.contains("the handler broke on 1"), "{failures:?}");
    assert!(failures[1].0 == 99 && failures[1].1.contains("invalid digit"), "{failures:?}");
    assert!(failures[2].0 == 3 && failures[2].1.contains("invalid type: string \"one\""), "{failures:?}");
    assert!(
        failures[3].0 == 3 && failures[3].1.contains("no handler for message type \"leap\""),
        "{failures:?}"
    );
    pump.drain().await;
}

#[tokio::test]
async fn a_row_that_cannot_succeed_moves_to_the_dead_letters_and_frees_its_stream() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, mut told) = fated();
    let stream = Uuid::from_u128(7);
    store(&client, &[step(1, "permanent").stream(stream), step(2, "ok").stream(stream)]).await;
    let pump =
        WorkPump::builder(database.url()).options(quick()).handler("step", handler).start().await.unwrap();
    assert_eq!(told.recv().await, Some((1, 1)));
    assert_eq!(told.recv().await, Some((2, 1)));
    pump.drain().await;
    let letter = client
        .query_typed_one(
            "select category, error, attempts, row_snapshot #>> '{payload,fate}' from wh_dead_letters",
            &[],
        )
        .await
        .unwrap();
    let letter: (String, String, i32, String) = (letter.get(0), letter.get(1), letter.get(2), letter.get(3));
    assert_eq!(letter, ("inbox".into(), "never".into(), 1, "permanent".into()));
}

#[tokio::test]
async fn attempts_end_in_the_dead_letters() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, _told) = fated();
    let mut options = quick();
    options.dispatch.max_attempts = 2;
    options.dispatch.retry_base_seconds = 1;
    store(&client, &[step(1, "error")]).await;
    let pump =
        WorkPump::builder(database.url()).options(options).handler("step", handler).start().await.unwrap();
    until(&client, "select count(*) = 1 from wh_dead_letters where attempts = 2 and failure_reason = 5")
        .await;
    pump.drain().await;
}

#[tokio::test]
async fn a_message_seen_before_is_not_handled_again_even_after_it_is_gone() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, mut told) = fated();
    let message = step(1, "ok");
    let producer = Producer::new("public").unwrap();
    store(&client, std::slice::from_ref(&message)).await;
    let pump =
        WorkPump::builder(database.url()).options(quick()).handler("step", handler).start().await.unwrap();
    assert_eq!(told.recv().await, Some((1, 1)));
    until(&client, "select count(*) = 0 from wh_inbox").await;
    let again = producer.inbox(&client, &[message, step(2, "ok")]).await.unwrap();
    assert_eq!(again.stored.iter().map(|stored| stored.is_new).collect::<Vec<_>>(), [false, true]);
    assert_eq!(told.recv().await, Some((2, 1)));
    pump.drain().await;
}

#[tokio::test]
async fn an_evicted_pump_stops_and_says_so() {
    let database = common::database().await;
    let client = database.connect().await;
    let (handler, mut told) = fated();
    // Else it is back under another id before anybody has looked.
    let mut options = quick();
    options.liveness.on_evicted = OnEvicted::Stop;
    let pump =
        WorkPump::builder(database.url()).options(options).handler("step", handler).start().await.unwrap();
    assert!(pump.is_ready());
    client
        .execute_typed("select evict_instance($1, null, 'test')", &[(&pump.instance_id(), Type::UUID)])
        .await
        .unwrap();
    store(&client, &[step(1, "ok")]).await;
    pump.wake();
    eventually("the pump notices its eviction", async || !pump.is_ready()).await;
    pump.drain().await;
    assert!(told.try_recv().is_err(), "an evicted instance runs nothing");
}

#[tokio::test]
async fn everything_works_through_a_transaction_pooler() {
    let database = common::database().await;
    let client = database.connect().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 3).await else { return };
    let (handler, mut told) = fated();
    let messages: Vec<_> =
        (0..300).map(|n| step(n, "ok").stream(Uuid::from_u128(1 + u128::from(n) % 7))).collect();
    store(&client, &messages).await;
    let pump = WorkPump::builder(bouncer.url(database.name()))
        .options(quick())
        .handler("step", handler)
        .start()
        .await
        .unwrap();
    for _ in 0..messages.len() {
        told.recv().await.unwrap();
    }
    pump.drain().await;
    until(&client, "select count(*) = 0 from wh_inbox").await;
}

#[tokio::test]
async fn what_cannot_start_names_the_value_and_the_next_step() {
    let migrated = common::database().await;
    let empty = common::empty_database().await;
    let start = |builder: workpump::Builder| async move {
        builder.start().await.expect_err("cannot start").to_string()
    };
    let with = |url: &str| WorkPump::builder(url).handler("step", fated().0);

    let text = start(with("postgresql://user:sesame@host:port/db")).await;
    assert!(text.contains("database URL cannot be read") && !text.contains("sesame"), "{text}");
    let text = start(with("host=/nowhere user=u password=sesame")).await;
    assert!(text.starts_with("cannot connect to the database") && !text.contains("sesame"), "{text}");
    let text = start(with(empty.url())).await;
    assert!(text.contains("is not migrated: run `workpump migrate`"), "{text}");
    let text = start(with(migrated.url()).schema("")).await;
    assert!(text.contains("schema name \"\" is empty"), "{text}");
    let text = start(WorkPump::builder(migrated.url())).await;
    assert!(text.contains("no publisher and no handler"), "{text}");
    let text = start(with(migrated.url()).handler("step", fated().0)).await;
    assert!(text.contains("two handlers for message type \"step\""), "{text}");
    let mut options = Options::default();
    options.dispatch.max_in_flight = 0;
    let text = start(with(migrated.url()).options(options)).await;
    assert!(text.contains("dispatch.max_in_flight = 0 cannot work"), "{text}");

    let client = migrated.connect().await;
    client.batch_execute("create role nobody_special login").await.unwrap();
    let text = start(with(&migrated.url_as("nobody_special"))).await;
    assert!(text.contains("permission denied"), "{text}");
    client
        .batch_execute("insert into wh_schema_migrations (name, checksum, min_library) values ('9999_later', 'x', '99.0.0')")
        .await
        .unwrap();
    let text = start(with(migrated.url())).await;
    assert!(text.contains("needs workpump 99.0.0 or newer"), "{text}");
}

struct Quiet(Arc<UnboundedSender<Uuid>>);

impl Publisher for Quiet {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let _ = self.0.send(message.message_id);
        Ok(())
    }
}

/// One message through a pump that is started and drained by whoever polls this.
async fn one_message(url: String) -> Result<(), Error> {
    let (told, mut telling) = unbounded_channel();
    let pump = WorkPump::builder(url).options(quick()).publisher(Quiet(Arc::new(told))).start().await?;
    assert!(telling.recv().await.is_some());
    pump.drain().await;
    Ok(())
}

#[tokio::test]
async fn the_pump_runs_from_any_runtime_and_from_none() {
    let database = common::database().await;
    let client = database.connect().await;
    let producer = Producer::new("public").unwrap();
    let messages: Vec<_> = (0..3).map(|n| NewOutbox::new("note", &n)).collect();
    let (first, second, third) =
        (database.url().to_owned(), database.url().to_owned(), database.url().to_owned());

    assert_eq!(producer.outbox(&client, &messages[..1]).await.unwrap().new_messages(), 1);
    one_message(first).await.expect("from tokio");
    assert_eq!(producer.outbox(&client, &messages[1..2]).await.unwrap().new_messages(), 1);
    let actix = std::thread::spawn(move || actix_rt::System::new().block_on(one_message(second)));
    actix.join().expect("thread").expect("from actix");
    assert_eq!(producer.outbox(&client, &messages[2..]).await.unwrap().new_messages(), 1);
    let plain = std::thread::spawn(move || futures_executor_block_on(one_message(third)));
    plain.join().expect("thread").expect("from a plain thread");
}

/// The smallest executor there is: it knows no timer and no socket.
fn futures_executor_block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[tokio::test]
async fn a_server_that_restarts_under_load_costs_time_and_no_message() {
    let mut server = common::server_with(&[]);
    let database = server.database().await;
    let client = database.connect().await;
    let (handler, mut told) = fated();
    let messages: Vec<_> =
        (0..500).map(|n| step(n, "ok").stream(Uuid::from_u128(1 + u128::from(n) % 11))).collect();
    store(&client, &messages).await;
    let mut options = quick();
    options.claim.max_streams_per_batch = 20;
    options.dispatch.max_in_flight = 40;
    let pump =
        WorkPump::builder(database.url()).options(options).handler("step", handler).start().await.unwrap();
    let mut seen = std::collections::HashSet::new();
    while seen.len() < 100 {
        seen.insert(told.recv().await.unwrap().0);
    }
    server.postgres.kill_9().expect("killed");
    server.postgres.restart().expect("restarted");
    while seen.len() < 500 {
        let next = tokio::time::timeout(PATIENCE, told.recv()).await.expect("the pump goes on by itself");
        seen.insert(next.unwrap().0);
    }
    let client = database.connect().await;
    until(&client, "select count(*) = 0 from wh_inbox").await;
    pump.drain().await;
}
