//! The notify gate of a pump on a real server: proven, or closed for a reason that an operator can act on, and work goes on either way.

mod common;

use common::proxy::{Door, Proxy};
use common::wait::eventually;
use common::{Bouncer, Database, quick};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_postgres::Client;
use workpump::engine::options::GateMode;
use workpump::{
    Account, Error, Gate, GateReport, NewOutbox, Options, OutboxMessage, Outcome, Producer, Publisher,
    WorkPump,
};

/// Tells the test what was published.
struct Tell(UnboundedSender<()>);

impl Publisher for Tell {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        let _ = self.0.send(());
        Ok(())
    }
}

struct Bench {
    pump: WorkPump,
    published: UnboundedReceiver<()>,
}

async fn start(url: &str, direct: &str, options: Options) -> Result<Bench, Error> {
    let (told, published) = unbounded_channel();
    let builder = WorkPump::builder(url).direct_url(direct).options(options).publisher(Tell(told));
    Ok(Bench { pump: builder.start().await?, published })
}

impl Bench {
    async fn account(&self, of: &str) -> Account {
        self.pump.observe().await.into_iter().find(|account| account.name == of).expect("it is there")
    }

    /// Waits until the gate is as wanted; a busy machine may need more than one try.
    async fn until(&self, what: &str, wanted: impl Fn(&GateReport) -> bool) {
        eventually(what, async || wanted(&self.pump.gate())).await;
    }

    async fn until_available(&self) {
        self.until("an available gate", |report| report.gate == Gate::Available).await;
    }

    /// Stores rows and waits until they are published.
    async fn moves(&mut self, client: &Client, rows: usize) {
        let messages: Vec<_> = (0..rows).map(|number| NewOutbox::new("note", &number)).collect();
        let _ = Producer::new("public").expect("a name").outbox(client, &messages).await.expect("stored");
        for _ in 0..rows {
            self.published.recv().await.expect("the pump is there");
        }
    }
}

async fn database() -> (Database, Client) {
    let db = common::database().await;
    let client = db.connect().await;
    (db, client)
}

async fn value<T: tokio_postgres::types::FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

/// What holds of the session that holds the alive-lock of the only member, which is the one that listens.
fn of_listener(what: &str) -> String {
    format!(
        "select {what} from pg_stat_activity a, pg_locks l, wh_service_instances m \
         where a.pid = l.pid and l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 1 \
         and (l.classid::bigint << 32) | l.objid::bigint = wh_alive_key(m.instance_id)"
    )
}

async fn gate_in_status(db: &Database) -> (String, Option<String>) {
    let status = workpump::status(db.url(), "public").await.expect("a status");
    let one = status.instances.into_iter().next().expect("one member");
    (one.gate, one.gate_reason)
}

#[tokio::test]
async fn the_gate_of_a_pump_on_a_real_server_is_proven_and_shown() {
    let (db, client) = database().await;
    let mut bench = start(db.url(), db.url(), quick()).await.expect("it starts");
    bench.until_available().await;
    let report = bench.pump.gate();
    assert_eq!(report.reason, None);
    assert!(report.last_verified_seconds_ago.is_some_and(|ago| ago < 60.0), "{report:?}");
    let account = bench.account("notify_gate").await;
    assert!(account.counter("proofs") >= 1 && account.notes["gate"] == "available", "{account:?}");
    eventually("a beat that says so", async || gate_in_status(&db).await == ("available".to_owned(), None))
        .await;
    let query: String =
        value(&client, &of_listener("a.state || ', ' || coalesce(a.backend_xmin::text, 'no xmin')")).await;
    assert_eq!(query, "idle, no xmin", "a listener holds nobody's vacuum up");
    bench.moves(&client, 10).await;
    let probes = bench.account("notify_gate").await.counter("probes");
    let asked = futures_util::future::join_all((0..10).map(|_| bench.pump.probe_gate())).await;
    assert!(asked.iter().all(|report| report.gate == Gate::Available), "{asked:?}");
    let again = bench.account("notify_gate").await.counter("probes");
    assert!((probes + 1..probes + 10).contains(&again), "askers share proofs: {}", again - probes);
    bench.pump.drain().await;
    assert_eq!(bench.pump.gate().reason.as_deref(), Some("this instance is leaving"));
}

#[tokio::test]
async fn a_session_that_is_killed_closes_the_gate_and_the_next_one_opens_it_after_a_proof_of_its_own() {
    let (db, client) = database().await;
    let mut bench = start(db.url(), db.url(), quick()).await.expect("it starts");
    for outage in 1..=5 {
        bench.until_available().await;
        let before = bench.account("notify_gate").await;
        let kill = of_listener("count(pg_terminate_backend(a.pid, 5000))");
        eventually("a session to kill", async || value::<i64>(&client, &kill).await == 1).await;
        bench.until("a change", |report| report.changes > 2 * outage && report.gate == Gate::Available).await;
        let after = bench.account("notify_gate").await;
        assert!(after.counter("proofs") > before.counter("proofs"), "{after:?}");
        eventually("the lock", async || bench.pump.is_alive_lock_held()).await;
        eventually("one session", async || value::<i64>(&client, &of_listener("count(*)")).await == 1).await;
    }
    eventually("catch-ups", async || bench.account("claim").await.counter("reconnect_catch_up") >= 5).await;
    assert_eq!(bench.account("claim").await.counter("startup_catch_up"), 1);
    bench.moves(&client, 10).await;
    bench.pump.drain().await;
}

#[tokio::test]
async fn a_direct_url_that_leads_to_a_pooler_is_named_and_work_is_polled_for() {
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    let (db, client) = database().await;
    let mut bench = start(db.url(), &bouncer.url(db.name()), quick()).await.expect("it starts");
    let report = bench.pump.gate();
    assert_eq!((report.gate, report.last_verified_seconds_ago), (Gate::Unavailable, None));
    let reason = report.reason.expect("there is one");
    assert!(
        reason.contains("not a direct connection") && reason.contains("leads past the pooler"),
        "{reason}"
    );
    bench.moves(&client, 20).await;
    eventually("a beat that says so", async || {
        gate_in_status(&db).await == ("unavailable".to_owned(), Some(reason.clone()))
    })
    .await;
    assert_eq!(bench.pump.probe_gate().await.gate, Gate::Unavailable);
    assert!(bench.pump.is_ready());
    bench.pump.drain().await;
}

#[tokio::test]
async fn a_database_url_through_a_pooler_is_the_way_that_producers_take_and_is_proven_as_such() {
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    let (db, client) = database().await;
    let mut bench = start(&bouncer.url(db.name()), db.url(), quick()).await.expect("it starts");
    bench.until_available().await;
    bench.moves(&client, 10).await;
    bench.pump.drain().await;
}

#[tokio::test]
async fn a_direct_url_that_leads_to_another_database_or_server_is_refused_by_the_start_in_words() {
    let (db, client) = database().await;
    let (other, other_client) = database().await;
    let elsewhere = common::server_with(&[]);
    let third = elsewhere.database().await;
    let third_client = third.connect().await;
    for (direct, leads_to) in [(&other, "database"), (&third, "another server")] {
        let error = start(db.url(), direct.url(), quick()).await.err().expect("it cannot start");
        let text = error.to_string();
        assert!(matches!(error, Error::LeadsElsewhere { .. }), "{text}");
        assert!(text.contains(db.name()) && text.contains(direct.name()), "{text}");
        assert!(text.contains(leads_to) && text.contains("let both lead"), "{text}");
        assert!(!text.contains("postgresql://") && !text.contains("host="), "{text}");
    }
    for client in [&client, &other_client, &third_client] {
        let members = value::<i64>(client, "select count(*) from wh_service_instances").await;
        assert_eq!(members, 0, "nobody has joined");
    }
}

/// What a start cannot see: the database URL is not answered while it asks.
#[tokio::test]
async fn two_urls_to_different_databases_that_the_start_could_not_compare_are_found_by_the_proof() {
    let (db, _client) = database().await;
    let (other, _other_client) = database().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let door = Proxy::to(socket).await.expect("a door");
    door.set(Door::Shut).await;
    let url = format!("postgresql://postgres@{}/{}", door.address(), db.name());
    let bench = start(&url, other.url(), quick()).await.expect("it starts all the same");
    door.set(Door::Open).await;
    bench
        .until("the reason", |report| {
            report
                .reason
                .as_ref()
                .is_some_and(|why| why.contains("nothing delivered") && why.contains("very database"))
        })
        .await;
    let report = bench.pump.probe_gate().await;
    assert_eq!((report.gate, report.last_verified_seconds_ago), (Gate::Unavailable, None));
    bench.pump.drain().await;
}

#[tokio::test]
async fn where_notify_is_required_a_pooler_on_the_direct_url_fails_the_start_by_name() {
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    let (db, client) = database().await;
    let mut options = quick();
    options.gate.mode = GateMode::ListenNotify;
    let error =
        start(db.url(), &bouncer.url(db.name()), options.clone()).await.err().expect("it cannot start");
    let text = error.to_string();
    assert!(matches!(error, Error::Start(_)) && text.contains("not a direct connection"), "{text}");
    assert_eq!(value::<i64>(&client, "select count(*) from wh_service_instances").await, 0);
    let bench = start(db.url(), db.url(), options).await.expect("and with a direct one it does");
    assert_eq!(bench.pump.gate().gate, Gate::Available);
    bench.pump.drain().await;
}

#[tokio::test]
async fn in_the_polling_mode_nobody_listens_and_the_lock_is_held_all_the_same() {
    let (db, client) = database().await;
    let mut options = quick();
    options.gate.mode = GateMode::Polling;
    let mut bench = start(db.url(), db.url(), options).await.expect("it starts");
    assert_eq!(bench.pump.gate().gate, Gate::Unconfigured);
    eventually("the lock", async || bench.pump.is_alive_lock_held()).await;
    bench.moves(&client, 10).await;
    let account = bench.account("notify_gate").await;
    assert_eq!((account.counter("probes"), account.counter("gate_changes")), (0, 0));
    assert_eq!(gate_in_status(&db).await.0, "unconfigured");
    bench.pump.drain().await;
}

#[tokio::test]
async fn an_idle_session_behind_a_dead_link_is_found_by_the_probe_and_the_gate_comes_back_by_itself() {
    let (db, client) = database().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let proxy = Proxy::to(socket).await.expect("a proxy");
    let direct = format!("postgresql://postgres@{}/{}", proxy.address(), db.name());
    let mut options = quick();
    (options.gate.probe_interval_seconds, options.gate.probe_timeout_seconds) = (1, 2);
    let mut bench = start(db.url(), &direct, options).await.expect("it starts");
    bench.until_available().await;
    let before = bench.pump.gate().changes;
    // Nothing is said on the link any more, and no socket ends.
    proxy.hold_all();
    bench.until("a change", |report| report.changes > before).await;
    let failure = bench.pump.gate().last_failure.expect("there was one");
    assert!(failure.contains("deaf") || failure.contains("no answer"), "{failure}");
    bench.until_available().await;
    bench.moves(&client, 10).await;
    bench.pump.drain().await;
}

#[tokio::test]
async fn a_server_that_is_stopped_closes_the_gate_and_opens_it_when_it_is_back() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let mut bench = start(db.url(), db.url(), quick()).await.expect("it starts");
    bench.until_available().await;
    server.postgres.stop_immediately().expect("it stops");
    bench.until("a closed gate", |report| report.gate == Gate::Unavailable).await;
    server.postgres.restart().expect("it starts again");
    bench.until_available().await;
    let client = db.connect().await;
    bench.moves(&client, 10).await;
    bench.pump.drain().await;
}
