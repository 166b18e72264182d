//! The kill-switch of the heartbeat on a real server: peers take over, and whoever is switched off says why it is not ready.

mod common;

use std::time::Duration;

use common::wait::eventually;
use common::{Database, quick};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher, WorkPump};

/// Publishes nothing until it is told to stop, or at once.
struct Hold(bool);

impl Publisher for Hold {
    async fn publish_one(&self, message: &OutboxMessage) -> Outcome {
        if self.0 {
            message.cancel.cancelled().await;
        }
        Ok(())
    }
}

fn options() -> Options {
    let mut options = quick();
    options.liveness.lock_loss_grace_seconds = 1;
    options
}

async fn start(db: &Database, options: Options, hold: bool) -> WorkPump {
    WorkPump::builder(db.url()).options(options).publisher(Hold(hold)).start().await.expect("it starts")
}

async fn until(client: &Client, sql: &str) {
    eventually(sql, async || client.query_one(sql, &[]).await.expect(sql).get(0)).await;
}

async fn until_declared(client: &Client, id: Uuid) {
    let sql = format!(
        "select count(*) = 1 from wh_live_instances where instance_id = '{id}' and lock_held and lock_declared"
    );
    until(client, &sql).await;
}

async fn store(client: &Client, count: usize) {
    let messages: Vec<_> = (0..count).map(|number| NewOutbox::new("note", &number)).collect();
    let _ = Producer::new("public").expect("a schema").outbox(client, &messages).await.expect("stored");
}

#[tokio::test]
async fn peers_take_over_from_a_pump_whose_heartbeat_is_switched_off_and_it_comes_back_under_a_fresh_id() {
    let db = common::database().await;
    let client = db.connect().await;
    let first = start(&db, options(), true).await;
    let before = first.instance_id();
    until_declared(&client, before).await;
    store(&client, 20).await;
    first.wake();
    until(&client, &format!("select count(*) = 20 from wh_outbox where instance_id = '{before}'")).await;
    let second = start(&db, options(), false).await;
    until_declared(&client, second.instance_id()).await;

    // Else the census would find the dead, half a minute later.
    let watching = "select count(*) = 2 from pg_stat_activity where datname = current_database() \
                    and wait_event_type = 'Lock' and query like 'CALL%wh_watch%'";
    until(&client, watching).await;

    first.set_heartbeat(false);
    assert!(!first.is_ready());
    let why = first.not_ready_because().expect("a reason");
    assert!(why.contains("its heartbeat is disabled (`heartbeat.enabled`)"), "{why}");
    until(&client, "select count(*) = 0 from wh_outbox").await;
    let reason = "select reason from wh_instance_evictions where instance_id = $1";
    let reason: String = client.query_one(reason, &[&before]).await.expect("a tombstone").get(0);
    assert_eq!(reason, "alive-lock lost");
    // Nothing follows: no member of this pump, whatever it has heard.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(first.instance_id(), before);
    until(&client, "select count(*) = 1 from wh_service_instances").await;

    first.set_heartbeat(true);
    eventually("it is ready", async || first.is_ready()).await;
    assert_ne!(first.instance_id(), before);
    assert_eq!(first.not_ready_because(), None);
    until_declared(&client, first.instance_id()).await;
    assert!(first.drain().await.deregistered && second.drain().await.deregistered);
}

#[tokio::test]
async fn a_pump_alone_that_is_switched_off_and_on_goes_on_under_its_id() {
    let db = common::database().await;
    let client = db.connect().await;
    let pump = start(&db, options(), false).await;
    let me = pump.instance_id();
    for _ in 0..3 {
        until_declared(&client, me).await;
        pump.set_heartbeat(false);
        until(&client, "select bool_and(not lock_held) from wh_live_instances").await;
        eventually("the pump knows", async || !pump.is_alive_lock_held()).await;
        // A claim that was under way is not taken back.
        let claims_ended = async || {
            let accounts = pump.observe().await;
            accounts.iter().any(|it| it.name == "claim" && it.state == "disabled with the heartbeat")
        };
        eventually("no claim is under way", claims_ended).await;
        store(&client, 5).await;
        pump.wake();
        let beat: std::time::SystemTime = client
            .query_one("select last_heartbeat_at from wh_service_instances", &[])
            .await
            .expect("its row")
            .get(0);
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        let sql = "select last_heartbeat_at, (select count(*) from wh_outbox where instance_id is null) from wh_service_instances";
        let row = client.query_one(sql, &[]).await.expect("its row");
        assert_eq!((row.get::<_, std::time::SystemTime>(0), row.get::<_, i64>(1)), (beat, 5));
        pump.set_heartbeat(true);
        until(&client, "select count(*) = 0 from wh_outbox").await;
        eventually("it is ready", async || pump.is_ready()).await;
    }
    assert_eq!(pump.instance_id(), me);
    assert!(pump.drain().await.deregistered);
}
