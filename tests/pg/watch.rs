//! The death watch: seen within milliseconds, and four verdicts.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{
    DatabaseTime, DeathWatch, DirectSession, NotificationStream, StoreError, Suspect, SuspectVerdict,
};

use super::{beat, config, connect, instance, run, schema, value};
use crate::common::wait::eventually;
use crate::common::{self, Bouncer, Database};
use crate::pg::death_watch::PgDeathWatch;

const LONG: Duration = Duration::from_secs(20);

fn watch_of(db: &Database) -> PgDeathWatch {
    PgDeathWatch::new(&schema(), config(db.url())).driven_by(Handle::current())
}

/// A member that holds its lock and says so.
async fn holder(db: &Database, id: InstanceId) -> (Box<dyn DirectSession>, NotificationStream) {
    let control = db.connect().await;
    let session = connect(db.url()).await.unwrap();
    assert!(session.0.claim_alive_lock(id).await.unwrap());
    beat(&control, id, true).await;
    session
}

/// Ends whichever session holds the alive-lock of `id`.
async fn kill(control: &tokio_postgres::Client, id: InstanceId) {
    let sql = format!(
        "select count(pg_terminate_backend(h.pid, 5000)) from wh_held_keys() h where h.key = wh_alive_key('{id}')"
    );
    assert_eq!(value::<i64>(control, &sql).await, 1);
}

#[tokio::test]
async fn a_killed_peer_is_named_within_milliseconds() {
    let db = common::database().await;
    let control = db.connect().await;
    beat(&control, instance(1), true).await;
    let watch = watch_of(&db);
    let mut took = Vec::new();
    for _ in 0..20 {
        let _peer = holder(&db, instance(2)).await;
        let killing = async {
            let waiting = "select exists (select from pg_stat_activity where datname = current_database() \
                           and wait_event_type = 'Lock' and query like 'CALL%')";
            eventually("a watcher", async || value::<bool>(&control, waiting).await).await;
            let killed = Instant::now();
            kill(&control, instance(2)).await;
            killed
        };
        let seeing = async { (watch.watch(instance(1), LONG, false).await.unwrap(), Instant::now()) };
        let (killed, (suspect, seen)) = futures_util::future::join(killing, seeing).await;
        assert_eq!(suspect.expect("a suspect").peer, instance(2));
        took.push(seen.duration_since(killed));
    }
    took.sort_unstable();
    println!("kill to suspect: median {:?}, worst {:?}", took[took.len() / 2], took[took.len() - 1]);
    assert!(took[took.len() / 2] < Duration::from_millis(500), "{took:?}");
}

#[tokio::test]
async fn a_wait_without_event_names_nobody_and_the_census_is_asked_for() {
    let db = common::database().await;
    let control = db.connect().await;
    beat(&control, instance(1), true).await;
    beat(&control, instance(3), true).await;
    let watch = watch_of(&db);
    let short = Duration::from_millis(150);
    let start = Instant::now();
    assert_eq!(watch.watch(instance(1), short, false).await.unwrap(), None);
    assert!(start.elapsed() >= short);
    let suspect = watch.watch(instance(1), short, true).await.unwrap().expect("nobody waits for it");
    assert_eq!(suspect.peer, instance(3));
}

#[tokio::test]
async fn every_verdict_is_understood() {
    let db = common::database().await;
    let control = db.connect().await;
    let (me, peer) = (instance(1), instance(2));
    beat(&control, me, true).await;
    beat(&control, peer, true).await;
    let watch = watch_of(&db);
    let mut suspect = watch.watch(me, Duration::ZERO, true).await.unwrap().expect("no lock is held");
    assert_eq!(suspect.peer, peer);
    assert_eq!(
        watch.evict_suspect(me, suspect, Duration::from_mins(1)).await.unwrap(),
        SuspectVerdict::Early
    );
    let (session, _notifications) = connect(db.url()).await.unwrap();
    assert!(session.claim_alive_lock(peer).await.unwrap());
    assert_eq!(watch.evict_suspect(me, suspect, Duration::ZERO).await.unwrap(), SuspectVerdict::Alive);
    assert!(session.release_alive_lock(peer).await.unwrap());
    beat(&control, peer, true).await;
    assert_eq!(watch.evict_suspect(me, suspect, Duration::ZERO).await.unwrap(), SuspectVerdict::Beaten);
    suspect = watch.watch(me, Duration::ZERO, true).await.unwrap().expect("still none");
    assert_eq!(watch.evict_suspect(me, suspect, Duration::ZERO).await.unwrap(), SuspectVerdict::Evicted);
    assert_eq!(watch.evict_suspect(me, suspect, Duration::ZERO).await.unwrap(), SuspectVerdict::Beaten);
    let tombstone = "select instance_id || ' by ' || evicted_by from wh_instance_evictions";
    assert_eq!(value::<String>(&control, tombstone).await, format!("{peer} by {me}"));
}

#[tokio::test]
async fn the_grace_counts_from_the_instant_the_database_named_to_the_microsecond() {
    let db = common::database().await;
    let control = db.connect().await;
    beat(&control, instance(2), true).await;
    let watch = watch_of(&db);
    let before: i64 = micros(&control, "clock_timestamp()").await;
    let suspect = watch.watch(instance(1), Duration::ZERO, true).await.unwrap().expect("a suspect");
    let after: i64 = micros(&control, "clock_timestamp()").await;
    assert!((before..=after).contains(&suspect.since.0), "{before} {suspect:?} {after}");
    // The beat is not older than its own instant: not `<`.
    let beaten = micros(&control, "last_heartbeat_at from wh_service_instances").await;
    let at = |since| Suspect { peer: instance(2), since: DatabaseTime(since) };
    let verdict = watch.evict_suspect(instance(1), at(beaten), Duration::ZERO).await.unwrap();
    assert_eq!(verdict, SuspectVerdict::Beaten);
    let verdict = watch.evict_suspect(instance(1), at(beaten + 1), Duration::ZERO).await.unwrap();
    assert_eq!(verdict, SuspectVerdict::Evicted);
}

async fn micros(client: &tokio_postgres::Client, what: &str) -> i64 {
    let (column, from) = what.split_once(' ').unwrap_or((what, ""));
    let sql = format!(
        "select (extract(epoch from {column} - timestamptz '2000-01-01 00:00:00+00') * 1000000)::bigint {from}"
    );
    value(client, &sql).await
}

#[tokio::test]
async fn an_evicted_judge_is_told() {
    let db = common::database().await;
    let control = db.connect().await;
    let me = instance(1);
    run(&control, &format!("select evict_instance('{me}', null, 'test')")).await;
    beat(&control, instance(2), true).await;
    let watch = watch_of(&db);
    let suspect = watch.watch(me, Duration::ZERO, true).await.unwrap().expect("a suspect");
    let error = watch.evict_suspect(me, suspect, Duration::ZERO).await.expect_err("evicted");
    assert!(matches!(error, StoreError::Evicted(id) if id == me), "{error}");
}

#[tokio::test]
async fn a_watch_that_is_dropped_leaves_no_session_behind_and_the_next_call_works() {
    let db = common::database().await;
    let control = db.connect().await;
    let _peer = holder(&db, instance(2)).await;
    let watch = watch_of(&db);
    let watching =
        "select count(*) from pg_stat_activity where datname = current_database() and query like 'CALL%'";
    let dropped = tokio::select! {
        _ = watch.watch(instance(1), LONG, false) => false,
        () = eventually("a watcher", async || value::<i64>(&control, watching).await == 1) => true,
    };
    assert!(dropped);
    assert_eq!(watch.watch(instance(1), Duration::ZERO, false).await.unwrap(), None);
    eventually("the end of the first", async || value::<i64>(&control, watching).await == 1).await;
    kill(&control, instance(2)).await;
    assert!(watch.watch(instance(1), LONG, true).await.unwrap().is_some());
}

#[tokio::test]
async fn a_watch_whose_session_is_killed_fails_once_and_then_goes_on() {
    let db = common::database().await;
    let control = db.connect().await;
    let watch = watch_of(&db);
    assert_eq!(watch.watch(instance(1), Duration::ZERO, false).await.unwrap(), None);
    assert_eq!(super::kill_sessions(&control).await, 1);
    // Whether the first call still meets the dead session is a matter of microseconds.
    eventually("a watch", async || watch.watch(instance(1), Duration::ZERO, false).await.is_ok()).await;
}

#[tokio::test]
async fn nobody_watches_through_a_pooler() {
    let db = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    let watch = PgDeathWatch::new(&schema(), config(&bouncer.url(db.name())));
    let error = watch.watch(instance(1), Duration::ZERO, false).await.expect_err("a pooler");
    assert!(matches!(error, StoreError::NotDirect(_)), "{error}");
}
