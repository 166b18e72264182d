//! Signals on a real server: sent with a transaction, heard by whoever listens, over one session.

mod common;
mod signal_lab;

use actix::prelude::*;
use common::Bouncer;
use common::wait::eventually;
use futures_util::{FutureExt, StreamExt};
use serde::{Deserialize, Serialize};
use signal_lab::{Lab, gate, listening, next, next_value, pump, topic};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use workpump::signals::{BadTopic, Heard, Signal, SignalError, Subscribe, Topic};
use workpump::supervision::Spec;
use workpump::{Producer, WorkPump};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct PriceChanged {
    article: String,
    cents: u64,
}

fn price(cents: u64) -> PriceChanged {
    PriceChanged { article: "Käse \"alt\"\n".to_owned(), cents }
}

#[tokio::test]
async fn a_typed_value_goes_out_with_its_transaction_or_not_at_all() {
    let mut lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<PriceChanged>("prices"));
    let mut signals = listening(&pump, &topic).await;
    let undone = lab.client.transaction().await.unwrap();
    lab.producer.signal(&undone, &topic, &price(1)).await.unwrap();
    undone.rollback().await.unwrap();
    let done = lab.client.transaction().await.unwrap();
    for cents in [2, 3, 3, 4] {
        lab.producer.signal(&done, &topic, &price(cents)).await.unwrap();
    }
    assert!(signals.recv().now_or_never().is_none(), "not before the commit");
    done.commit().await.unwrap();
    // The server folds what is sent twice in one transaction.
    for cents in [2, 3, 4] {
        assert_eq!(next(&mut signals).await, Signal::Value(price(cents)));
    }
    pump.drain().await;
    assert_eq!(signals.next().await, None, "the stream ends with the pump");
    assert_eq!(pump.subscribe(&topic).recv().await, None);
}

#[tokio::test]
async fn a_signal_sent_through_a_transaction_mode_pooler_arrives() {
    let mut lab = Lab::new().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 3).await else { return };
    let url = bouncer.url(lab.database.name());
    lab.client = common::connect(&url).await;
    let (pump, behind_pooler, topic) = (lab.pump().await, pump(&url, "public").await, topic::<u64>("t"));
    let mut deaf = behind_pooler.subscribe(&topic);
    let mut signals = listening(&pump, &topic).await;
    for number in 0..10 {
        let transaction = lab.client.transaction().await.unwrap();
        lab.producer.signal(&transaction, &topic, &number).await.unwrap();
        transaction.commit().await.unwrap();
        assert_eq!(next(&mut signals).await, Signal::Value(number));
    }
    // Who has no direct session is never told that it listens, and says why.
    assert!(deaf.recv().now_or_never().is_none());
    let accounts = behind_pooler.observe().await;
    let account = accounts.iter().find(|account| account.name == "notify_gate").unwrap();
    assert_eq!(account.state, "no direct connection: a pooler answers");
    behind_pooler.drain().await;
    pump.drain().await;
}

#[tokio::test]
async fn many_topics_and_subscribers_share_one_session_and_each_channel_is_listened_to_once() {
    let lab = Lab::new().await;
    let pump = lab.pump().await;
    let first = topic::<u64>("topic-0");
    let mut early = listening(&pump, &first).await;
    let topics: Vec<Topic<u64>> = (0..50).map(|n| topic(&format!("topic-{n}"))).collect();
    let mut streams = Vec::new();
    for topic in topics.iter().chain(&topics) {
        streams.push(listening(&pump, topic).await);
    }
    assert_eq!(gate(&pump, "subscriptions").await, 50, "a hundred streams, fifty channels");
    let sessions = "select count(*) from pg_stat_activity where datname = current_database()";
    let sessions: i64 = lab.value(sessions).await;
    assert!(sessions < 15, "{sessions}: the pump's own, and the test's");
    assert_eq!(gate(&pump, "connects").await, 1);
    let listens = gate(&pump, "listens").await;
    for (number, topic) in (0..).zip(&topics) {
        lab.signal(topic, &number).await;
    }
    for (place, stream) in streams.iter_mut().enumerate() {
        assert_eq!(next(stream).await, Signal::Value(place as u64 % 50));
    }
    assert_eq!(next(&mut early).await, Signal::Value(0));
    assert_eq!(gate(&pump, "listens").await, listens, "nothing more is asked for");

    // The last reader that goes lets the channel go, and not the first.
    drop(streams.split_off(50));
    assert_eq!((gate(&pump, "subscriptions").await, gate(&pump, "unlistens").await), (50, 0));
    drop(streams);
    eventually("all others are let go", async || {
        gate(&pump, "subscriptions").await == 1 && gate(&pump, "unlistens").await > 0
    })
    .await;
    lab.signal(&topics[1], &7).await;
    lab.signal(&first, &8).await;
    assert_eq!(next(&mut early).await, Signal::Value(8), "the one that stayed still hears");

    // Whoever comes back is listened to again, and hears nothing of the time between.
    let mut again = listening(&pump, &topics[1]).await;
    lab.signal(&topics[1], &9).await;
    assert_eq!(next(&mut again).await, Signal::Value(9));
    pump.drain().await;
}

#[tokio::test]
async fn the_limit_is_that_of_the_server_and_a_value_beyond_it_leaves_the_transaction_as_it_was() {
    let mut lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<String>("large"));
    let mut signals = listening(&pump, &topic).await;
    let largest = "x".repeat(Producer::MAX_SIGNAL_BYTES - 2);
    let transaction = lab.client.transaction().await.unwrap();
    let error = lab.producer.signal(&transaction, &topic, &format!("{largest}y")).await.unwrap_err();
    assert!(matches!(error, SignalError::TooLarge { bytes: 8_000, limit: 7_999, .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the value for topic large takes 8000 bytes as JSON, 7999 are allowed: store it, and send a reference"
    );
    lab.producer.signal(&transaction, &topic, &largest).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(next(&mut signals).await, Signal::Value(largest));
    let beyond = lab.client.query_typed("select pg_notify('c', repeat('x', 8000))", &[]).await;
    assert!(beyond.unwrap_err().to_string().contains("db error"), "the server would refuse it");
    let transaction = lab.client.transaction().await.unwrap();
    assert!(transaction.batch_execute("select 1 / 0").await.is_err());
    let error = lab.producer.signal(&transaction, &topic, &String::new()).await.unwrap_err();
    assert!(matches!(&error, SignalError::Database { code, .. } if code == "25P02"), "{error}");
    drop(transaction);
    pump.drain().await;
}

#[tokio::test]
async fn what_is_no_value_of_the_type_is_told_as_such_and_the_next_one_comes() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<PriceChanged>("prices"));
    let mut signals = listening(&pump, &topic).await;
    let channel = lab.producer.channel(&topic);
    for payload in ["", "no json", "{\"article\": 1}"] {
        lab.client.query("select pg_notify($1, $2)", &[&&*channel, &payload]).await.unwrap();
        let Signal::Undecodable { payload: sent, error } = next(&mut signals).await else {
            panic!("{payload}")
        };
        assert!(&*sent == payload && !error.is_empty());
    }
    lab.signal(&topic, &price(5)).await;
    assert_eq!(next(&mut signals).await, Signal::Value(price(5)));
    pump.drain().await;
}

#[tokio::test]
async fn pumps_of_two_schemas_do_not_hear_each_other() {
    let lab = Lab::new().await;
    let odd = "Other \"schema'";
    workpump::migrate(lab.database.url(), odd).await.unwrap();
    let (here, there) = (lab.pump().await, pump(lab.database.url(), odd).await);
    let topic = topic::<u64>("shared.name");
    let (mut ours, mut theirs) = (listening(&here, &topic).await, listening(&there, &topic).await);
    there.producer().signal(&lab.client, &topic, &1).await.unwrap();
    here.producer().signal(&lab.client, &topic, &2).await.unwrap();
    there.producer().signal(&lab.client, &topic, &3).await.unwrap();
    assert_eq!(next(&mut ours).await, Signal::Value(2));
    assert_eq!((next_value(&mut theirs).await, next_value(&mut theirs).await), (1, 3));
    assert!(ours.recv().now_or_never().is_none());
    here.drain().await;
    there.drain().await;
}

#[tokio::test]
async fn no_topic_reaches_the_channels_on_which_the_pump_is_rung() {
    let lab = Lab::new().await;
    let pump = lab.pump().await;
    let work = format!("select wh_work_channel('{}')", pump.instance_id());
    let work: String = lab.value(&work).await;
    assert!(matches!(Topic::<()>::new(&work), Err(BadTopic::TooLong { .. })));
    for name in ["work", "wh_work", "_work_", "../wh_work_1", "wh_work_0"] {
        let channel = lab.producer.channel(&topic::<()>(name));
        assert!(channel.starts_with("wh_sig_") && !work.starts_with(&*channel), "{channel}");
    }
    pump.drain().await;
}

#[tokio::test]
async fn a_slow_reader_keeps_the_newest_is_told_how_many_it_missed_and_holds_up_nobody() {
    let lab = Lab::new().await;
    let (pump, topic) = (lab.pump().await, topic::<u64>("fast"));
    let mut slow = listening(&pump, &topic).await.keep(3);
    let mut patient = listening(&pump, &topic).await;
    let mut least = listening(&pump, &topic).await.keep(0);
    let mut quick = listening(&pump, &topic).await;
    for number in 0..10 {
        lab.signal(&topic, &number).await;
        // Told last, so everybody else has it too.
        assert_eq!(next(&mut quick).await, Signal::Value(number));
    }
    assert_eq!(next(&mut slow).await, Signal::Missed { signals: 7 });
    for number in 7..10 {
        assert_eq!(next(&mut slow).await, Signal::Value(number));
    }
    assert_eq!(next(&mut least).await, Signal::Missed { signals: 9 });
    assert_eq!(next(&mut least).await, Signal::Value(9));
    for number in 0..10 {
        assert_eq!(next(&mut patient).await, Signal::Value(number));
    }
    lab.signal(&topic, &10).await;
    assert_eq!(next(&mut slow).await, Signal::Value(10), "once is told once");
    pump.drain().await;
}

/// Tells the test what it hears.
struct Listener(UnboundedSender<Signal<u64>>);

impl Actor for Listener {
    type Context = Context<Self>;
}

impl Handler<Heard> for Listener {
    type Result = ();

    fn handle(&mut self, heard: Heard, _: &mut Self::Context) {
        let _ = self.0.send(heard.into());
    }
}

#[tokio::test]
async fn an_actor_subscribes_in_its_factory_and_hears_in_every_life() {
    let lab = Lab::new().await;
    let (topic, (told, mut telling)) = (topic::<u64>("for.actors"), unbounded_channel());
    let channel = lab.producer.channel(&topic);
    let listener = Spec::new("listener", move |cx| {
        let gate = cx.registry().recipient::<Subscribe>().expect("a gate");
        gate.do_send(Subscribe { channel: channel.clone(), to: cx.addr().recipient() });
        Listener(told.clone())
    });
    let pump = WorkPump::builder(lab.database.url()).publisher(signal_lab::Nowhere).supervise(listener);
    let pump = pump.start().await.unwrap();
    assert_eq!(telling.recv().await, Some(Signal::Listening));
    lab.signal(&topic, &1).await;
    assert_eq!(telling.recv().await, Some(Signal::Value(1)));
    pump.registry().crash("listener").unwrap();
    assert_eq!(telling.recv().await, Some(Signal::Listening), "it asked again");
    lab.signal(&topic, &2).await;
    assert_eq!(telling.recv().await, Some(Signal::Value(2)));
    pump.drain().await;
}
