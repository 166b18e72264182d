//! Sockets that stay open and carry nothing: every call ends by its own deadline, and the next one takes another session.

mod common;

use std::collections::HashSet;

use common::proxy::Proxy;
use common::wait::{PATIENCE, eventually};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use uuid::Uuid;
use workpump::{NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

struct Teller(UnboundedSender<Uuid>);

impl Publisher for Teller {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        let _ = self.0.send(message.message_id);
        Ok(())
    }
}

/// A server that accepts and stays silent.
async fn silent() -> (String, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("postgresql://user:sesame@{}/db", listener.local_addr().expect("an address"));
    let accepting = tokio::spawn(async move {
        let mut sockets = Vec::new();
        while let Ok((socket, _)) = listener.accept().await {
            sockets.push(socket);
        }
    });
    (url, accepting)
}

#[tokio::test]
async fn a_server_that_accepts_and_stays_silent_is_an_error_and_no_hang() {
    let (url, accepting) = silent().await;
    let (told, _telling) = unbounded_channel();
    let all = async {
        let start = WorkPump::builder(&url).publisher(Teller(told)).start();
        let (pump, migrated, status) =
            tokio::join!(start, workpump::migrate(&url, "public"), workpump::status(&url, "public"));
        [
            pump.expect_err("no server").to_string(),
            migrated.expect_err("no server").to_string(),
            status.expect_err("no server").to_string(),
        ]
    };
    let errors = tokio::time::timeout(PATIENCE, Box::pin(all)).await.expect("an answer in time");
    for error in errors {
        assert!(error.contains("no answer to the login") && !error.contains("sesame"), "{error}");
    }
    accepting.abort();
}

#[tokio::test]
async fn a_pump_whose_sessions_go_dead_takes_others_and_loses_nothing() {
    let database = common::database().await;
    let client = database.connect().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let proxy = Proxy::to(socket).await.expect("a door");
    let url = format!("postgresql://postgres@{}/{}", proxy.address(), database.name());
    let mut options = Options::default();
    options.claim.polling_interval_milliseconds = 20;
    options.heartbeat.interval_seconds = 1;
    options.heartbeat.slow_interval_seconds = 1;
    let (told, mut telling) = unbounded_channel();
    let pump = WorkPump::builder(url).options(options).publisher(Teller(told)).start().await.expect("start");
    let producer = Producer::new("public").expect("schema");
    let mut expected = HashSet::new();
    for round in 0..2 {
        let messages: Vec<_> =
            (0..50).map(|n| NewOutbox::new("note", &json!({ "round": round, "n": n }))).collect();
        expected.extend(messages.iter().map(NewOutbox::message_id));
        assert_eq!(producer.outbox(&client, &messages).await.expect("stored").new_messages(), 50);
        if round == 1 {
            proxy.hold_all();
        }
        pump.wake();
        while !expected.is_empty() {
            let next = tokio::time::timeout(PATIENCE, telling.recv()).await.expect("the pump goes on");
            expected.remove(&next.expect("a message"));
        }
    }
    eventually("everything is settled", async || {
        client.query_typed_one("select count(*) = 0 from wh_outbox", &[]).await.expect("a count").get(0)
    })
    .await;
    eventually("the heartbeat goes on", async || {
        let fresh =
            "select last_heartbeat_at > clock_timestamp() - interval '3 seconds' from wh_service_instances";
        client.query_typed_one(fresh, &[]).await.expect("a member").get(0)
    })
    .await;
    pump.drain().await;
}
