//! Leases on a real database: a long handler keeps its row, whoever is in the way, and a hung one does not for ever.

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::quick;
use common::wait::{PATIENCE, eventually};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{Context, ExtendError, ExtendLease, Failure, Handler, NewInbox, Options, Producer, WorkPump};

#[derive(Debug, Serialize, Deserialize)]
struct Task {
    number: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Started { number: u64, attempts: u32 },
    Cancelled { number: u64 },
    Done { number: u64 },
    Extended(Result<(), ExtendError>),
}

/// Works until it is let go or told to stop.
struct Patient {
    told: UnboundedSender<Event>,
    go: Arc<Notify>,
    /// Extends its lease when it starts.
    extends: bool,
    /// Goes on when it is told to stop.
    stubborn: bool,
}

impl Handler<Task> for Patient {
    async fn handle(&self, cx: &mut Context<'_>, task: Task) -> Result<(), Failure> {
        let number = task.number;
        let _ = self.told.send(Event::Started { number, attempts: cx.attempts() });
        if self.extends {
            let before = cx.deadline();
            let extended = cx.extend().await;
            assert!(extended.as_ref().is_ok_and(|deadline| *deadline > before) || extended.is_err());
            let _ = self.told.send(Event::Extended(extended.map(drop)));
        }
        tokio::select! {
            () = self.go.notified() => {}
            () = cx.cancellation().cancelled() => {
                let _ = self.told.send(Event::Cancelled { number });
                if self.stubborn {
                    std::future::pending::<()>().await;
                }
                return Err(Failure::retry("told to stop"));
            }
        }
        let _ = self.told.send(Event::Done { number });
        Ok(())
    }
}

/// A lease of six seconds and no grace: renewed after 4.8 s, which leaves a busy machine 1.2 s.
fn short() -> Options {
    let mut options = quick();
    options.claim.lease_seconds = 6;
    options.lease_renewal.lease_grace_seconds = 0;
    options.lease_renewal.coalesce_window_milliseconds = 10;
    options.lease_renewal.max_renewals_per_work = 1_000;
    options
}

/// Longer, so that a busy machine has time for everything: renewed after 5 s of 10, given up after 9.
fn roomy() -> Options {
    let mut options = short();
    options.claim.lease_seconds = 10;
    options.lease_renewal.lease_grace_seconds = 2;
    options
}

struct Lab {
    database: common::Database,
    client: Client,
    told: UnboundedReceiver<Event>,
    telling: UnboundedSender<Event>,
    go: Arc<Notify>,
}

impl Lab {
    async fn new() -> Self {
        Self::on(common::database().await).await
    }

    async fn on(database: common::Database) -> Self {
        let client = database.connect().await;
        let (telling, told) = unbounded_channel();
        Self { database, client, told, telling, go: Arc::default() }
    }

    async fn store(&self, tasks: impl IntoIterator<Item = u64>, stream: Option<Uuid>) {
        let message = |number| {
            let message = NewInbox::new("task", &Task { number });
            if let Some(stream) = stream { message.stream(stream) } else { message }
        };
        let messages: Vec<_> = tasks.into_iter().map(message).collect();
        let stored = Producer::new("public")
            .expect("a schema name")
            .inbox(&self.client, &messages)
            .await
            .expect("stored");
        assert_eq!(stored.new_messages(), messages.len());
    }

    async fn pump(&self, options: Options, extends: bool, stubborn: bool) -> WorkPump {
        let (told, go) = (self.telling.clone(), Arc::clone(&self.go));
        WorkPump::builder(self.database.url())
            .options(options)
            .handler("task", Patient { told, go, extends, stubborn })
            .start()
            .await
            .expect("starts")
    }

    async fn next(&mut self) -> Event {
        timeout(PATIENCE, self.told.recv()).await.expect("in time").expect("a handler")
    }

    async fn text(&self, query: &str) -> String {
        self.client
            .query_typed_one(query, &[])
            .await
            .expect(query)
            .get::<_, Option<String>>(0)
            .unwrap_or_default()
    }

    async fn until(&self, condition: &str) {
        let holds =
            async || self.client.query_typed_one(condition, &[]).await.expect(condition).get::<_, bool>(0);
        eventually(condition, holds).await;
    }
}

async fn renewal(pump: &WorkPump, counter: &str) -> u64 {
    let accounts = pump.observe().await;
    accounts.iter().find(|account| account.name == "lease_renewal").expect("a renewer").counter(counter)
}

async fn dispatch(pump: &WorkPump, counter: &str) -> u64 {
    let accounts = pump.observe().await;
    accounts.iter().find(|account| account.name == "dispatch").expect("a dispatcher").counter(counter)
}

#[tokio::test]
async fn a_handler_that_runs_for_several_leases_keeps_its_row_and_its_run_and_nobody_else_gets_them() {
    let mut lab = Lab::new().await;
    lab.store(0..3, Some(Uuid::from_u128(7))).await;
    let mine = lab.pump(short(), false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    let other = lab.pump(short(), false, false).await;
    // Six renewals of three rows: nearly five leases long.
    eventually("six renewals", async || renewal(&mine, "renewed").await >= 18).await;
    let holders = "select count(*) = 3 and count(distinct instance_id) = 1 and max(attempts) = 1 and max(claim_epoch) = 1 from wh_inbox";
    lab.until(holders).await;
    for number in 0..3 {
        lab.go.notify_one();
        assert_eq!(lab.next().await, Event::Done { number });
        if number < 2 {
            assert_eq!(lab.next().await, Event::Started { number: number + 1, attempts: 1 });
        }
    }
    lab.until("select count(*) = 0 from wh_inbox").await;
    let (mine, other) = (mine.drain().await, other.drain().await);
    assert_eq!((mine.abandoned, other.released, other.settled), (0, 0, 0));
}

#[tokio::test]
async fn a_row_lock_of_an_outsider_delays_a_renewal_and_nothing_is_lost() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let pump = lab.pump(roomy(), false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    let mut outsider = lab.database.connect().await;
    let held = outsider.transaction().await.unwrap();
    held.query_typed("select from wh_inbox for update", &[]).await.unwrap();
    eventually("a renewal meets the lock", async || renewal(&pump, "locked").await >= 3).await;
    assert_eq!(renewal(&pump, "renewed").await, 0);
    held.rollback().await.unwrap();
    eventually("the lease is renewed", async || renewal(&pump, "renewed").await == 1).await;
    lab.go.notify_one();
    assert_eq!(lab.next().await, Event::Done { number: 0 });
    lab.until("select count(*) = 0 from wh_inbox").await;
    assert_eq!((renewal(&pump, "lost").await, dispatch(&pump, "completed").await), (0, 1));
    pump.drain().await;
}

#[tokio::test]
async fn a_session_killed_during_a_renewal_costs_neither_the_row_nor_a_renewal() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let mut options = roomy();
    options.lease_renewal.max_renewals_per_work = 2;
    let pump = lab.pump(options, false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    for renewals in 1..=2 {
        // A lock on the table stops the renewal in the middle, where the session is killed.
        let mut outsider = lab.database.connect().await;
        let held = outsider.transaction().await.unwrap();
        held.batch_execute("lock table wh_inbox in access exclusive mode").await.unwrap();
        let hand = lab.database.connect().await;
        let kill = "select count(*) filter (where pg_terminate_backend(pid)) > 0 from pg_stat_activity \
                    where datname = current_database() and wait_event_type = 'Lock' and query like '%renew_work%'";
        let killed = async || hand.query_typed_one(kill, &[]).await.unwrap().get::<_, bool>(0);
        eventually("a renewal is killed", killed).await;
        held.rollback().await.unwrap();
        eventually("it is renewed after all", async || renewal(&pump, "renewed").await == renewals).await;
    }
    assert!(renewal(&pump, "failed_flushes").await >= 2);
    lab.go.notify_one();
    assert_eq!(lab.next().await, Event::Done { number: 0 });
    lab.until("select count(*) = 0 from wh_inbox").await;
    pump.drain().await;
}

#[tokio::test]
async fn a_restart_of_the_server_leaves_a_long_handler_its_row() {
    let mut server = common::server_with(&[]);
    let mut lab = Lab::on(server.database().await).await;
    lab.store([0, 1], Some(Uuid::from_u128(5))).await;
    // Long enough for a restart on a busy machine.
    let mut options = roomy();
    options.claim.lease_seconds = 30;
    options.lease_renewal.lease_grace_seconds = 5;
    let pump = lab.pump(options, false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    server.postgres.stop_immediately().expect("stopped");
    eventually("a renewal fails", async || renewal(&pump, "failed_flushes").await >= 2).await;
    server.postgres.restart().expect("restarted");
    eventually("the run is renewed", async || renewal(&pump, "renewed").await >= 2).await;
    lab.client = lab.database.connect().await;
    lab.until("select count(*) = 2 and max(claim_epoch) = 1 and max(attempts) = 1 from wh_inbox").await;
    for number in 0..2 {
        lab.go.notify_one();
        assert_eq!(lab.next().await, Event::Done { number });
        if number == 0 {
            assert_eq!(lab.next().await, Event::Started { number: 1, attempts: 1 });
        }
    }
    lab.until("select count(*) = 0 from wh_inbox").await;
    pump.drain().await;
}

#[tokio::test]
async fn renewals_that_fail_until_the_deadline_stop_the_handler_in_time_and_its_row_is_issued_once_more() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let pump = lab.pump(roomy(), false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    // Every renewal is an error from here on, which says nothing about the lease.
    lab.client.batch_execute("alter function renew_work rename to gone").await.expect("it is gone");
    assert_eq!(lab.next().await, Event::Cancelled { number: 0 });
    let left = "select extract(epoch from lease_expiry - clock_timestamp())::text from wh_inbox";
    let left = lab.text(left).await;
    // It may be written by now that it has to be tried again; else the lease still stands.
    assert!(left.is_empty() || left.parse::<f64>().expect("seconds") > 0.0, "{left}");
    assert!(renewal(&pump, "failed_flushes").await >= 1);
    lab.client.batch_execute("alter function gone rename to renew_work").await.expect("it is back");
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 2 });
    lab.go.notify_one();
    assert_eq!(lab.next().await, Event::Done { number: 0 });
    lab.until("select count(*) = 0 from wh_inbox").await;
    assert_eq!(renewal(&pump, "renewed").await, 0);
    pump.drain().await;
}

#[tokio::test]
async fn after_the_cap_a_hung_handler_is_stopped_and_its_row_is_issued_again() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let mut options = short();
    options.lease_renewal.max_renewals_per_work = 2;
    let pump = lab.pump(options, false, true).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    assert_eq!(lab.next().await, Event::Cancelled { number: 0 });
    assert_eq!(renewal(&pump, "renewed").await, 2);
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 2 });
    lab.go.notify_one();
    assert_eq!(lab.next().await, Event::Done { number: 0 });
    lab.until("select count(*) = 0 from wh_inbox").await;
    assert_eq!(dispatch(&pump, "aborted_at_lease_end").await, 1);
    pump.drain().await;
}

#[tokio::test]
async fn a_row_that_was_stolen_stops_its_handler_at_its_next_renewal() {
    for (stubborn, how) in [(false, "lost_while_running"), (true, "aborted_at_lease_end")] {
        let mut lab = Lab::new().await;
        lab.store([0, 1], Some(Uuid::from_u128(3))).await;
        let pump = lab.pump(roomy(), false, stubborn).await;
        assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
        let steal = "with stolen as (update wh_inbox set claim_epoch = claim_epoch + 1, instance_id = gen_random_uuid(), \
                     lease_expiry = clock_timestamp() + interval '1 hour' returning 1) select count(*)::text from stolen";
        assert_eq!(lab.text(steal).await, "2");
        assert_eq!(lab.next().await, Event::Cancelled { number: 0 });
        eventually("nothing is in hand", async || dispatch(&pump, "in_hand").await == 0).await;
        assert_eq!(dispatch(&pump, how).await, 1);
        assert!(renewal(&pump, "lost").await >= 1);
        lab.until("select count(*) = 2 and max(claim_epoch) = 2 and max(attempts) = 1 from wh_inbox").await;
        pump.drain().await;
        lab.until("select count(*) = 2 and count(instance_id) = 2 from wh_inbox").await;
        assert!(lab.told.try_recv().is_err(), "the row behind it was not started");
    }
}

#[tokio::test]
async fn a_row_that_is_settled_by_hand_stops_its_handler_too() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let pump = lab.pump(roomy(), false, false).await;
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    lab.client.execute_typed("delete from wh_inbox", &[]).await.unwrap();
    assert_eq!(lab.next().await, Event::Cancelled { number: 0 });
    eventually("nothing is in hand", async || dispatch(&pump, "in_hand").await == 0).await;
    pump.drain().await;
}

#[tokio::test]
async fn handlers_extend_by_themselves_and_users_by_message() {
    let mut lab = Lab::new().await;
    lab.store([0], None).await;
    let mut options = roomy();
    options.lease_renewal.max_renewals_per_work = 1;
    let pump = lab.pump(options, true, false).await;
    let before = "select extract(epoch from lease_expiry - claimed)::text from (select lease_expiry, clock_timestamp() as claimed from wh_inbox) x";
    assert_eq!(lab.next().await, Event::Started { number: 0, attempts: 1 });
    assert_eq!(lab.next().await, Event::Extended(Ok(())));
    assert!(lab.text(before).await.parse::<f64>().unwrap() > 5.0);
    let id: Uuid = lab.text("select message_id::text from wh_inbox").await.parse().unwrap();
    let key = |id| workpump::engine::work::WorkKey {
        category: workpump::Category::Inbox,
        id: workpump::engine::work::WorkId(id),
    };
    let epoch = |epoch| workpump::engine::work::ClaimEpoch(epoch);
    let renewer = pump.registry().recipient::<ExtendLease>().expect("a renewer");
    let extend = |id, at| renewer.send(ExtendLease { key: key(id), epoch: epoch(at) });
    assert_eq!(extend(id, 1).await.unwrap(), Err(ExtendError::AtCap { renewals: 1 }));
    assert_eq!(extend(id, 2).await.unwrap(), Err(ExtendError::Lost), "no such claim");
    assert_eq!(extend(Uuid::from_u128(1), 1).await.unwrap(), Err(ExtendError::Lost), "no such row");
    assert_eq!(renewal(&pump, "unknown_handles").await, 2);
    lab.go.notify_one();
    assert_eq!(lab.next().await, Event::Done { number: 0 });
    pump.drain().await;
}

#[tokio::test]
async fn many_long_handlers_are_renewed_together() {
    let mut lab = Lab::new().await;
    lab.store(0..150, None).await;
    let mut options = roomy();
    options.lease_renewal.coalesce_window_milliseconds = 200;
    let pump = lab.pump(options, false, false).await;
    let mut started = HashSet::new();
    while started.len() < 150 {
        match lab.next().await {
            Event::Started { number, attempts: 1 } => drop(started.insert(number)),
            other => panic!("{other:?}"),
        }
    }
    eventually("two rounds", async || renewal(&pump, "renewed").await >= 300).await;
    let flushes = renewal(&pump, "flushes").await;
    assert!(flushes <= 20, "{flushes} statements for 300 renewals");
    lab.go.notify_waiters();
    for _ in 0..150 {
        assert!(matches!(lab.next().await, Event::Done { .. }));
    }
    lab.until("select count(*) = 0 from wh_inbox").await;
    pump.drain().await;
}
