//! The direct session: the alive-lock, notifications, pings, and the many ways in which it ends.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use workpump_actors::port::{Notification, StoreError};

use super::{beat, connect, instance, kill_sessions, value};
use crate::common;
use crate::common::proxy::Proxy;
use crate::common::wait::eventually;

const SOON: Duration = Duration::from_secs(20);

fn rung(channel: &str, payload: &str, own: bool) -> Notification {
    Notification { channel: channel.to_owned(), payload: payload.to_owned(), own }
}

#[tokio::test]
async fn the_alive_lock_has_one_holder_and_is_free_when_its_session_is_killed() {
    let db = common::database().await;
    let control = db.connect().await;
    let me = instance(1);
    beat(&control, me, false).await;
    let held = "select lock_held from wh_live_instances";
    let (first, mut end) = connect(db.url()).await.unwrap();
    assert!(!value::<bool>(&control, held).await);
    assert!(first.claim_alive_lock(me).await.unwrap());
    assert!(first.claim_alive_lock(me).await.unwrap(), "it is held here");
    assert!(value::<bool>(&control, held).await);
    assert_eq!(kill_sessions(&control).await, 1);
    assert_eq!(timeout(SOON, end.recv()).await.unwrap(), None);

    let (second, _notifications) = connect(db.url()).await.unwrap();
    let (third, _notifications) = connect(db.url()).await.unwrap();
    assert!(!value::<bool>(&control, held).await);
    assert!(second.claim_alive_lock(me).await.unwrap());
    assert!(!third.claim_alive_lock(me).await.unwrap(), "taken");
    assert!(third.claim_alive_lock(instance(2)).await.unwrap(), "another instance, another lock");
    assert!(!third.release_alive_lock(me).await.unwrap(), "not its own");
    assert!(second.release_alive_lock(me).await.unwrap());
    assert!(third.claim_alive_lock(me).await.unwrap());
}

#[tokio::test]
async fn a_session_that_is_dropped_gives_its_lock_up_at_once() {
    let db = common::database().await;
    let (first, notifications) = connect(db.url()).await.unwrap();
    let (second, _notifications) = connect(db.url()).await.unwrap();
    assert!(first.claim_alive_lock(instance(1)).await.unwrap());
    drop((first, notifications));
    eventually("the lock", async || second.claim_alive_lock(instance(1)).await.unwrap()).await;
}

#[tokio::test]
async fn rings_are_heard_in_order_and_ones_own_are_marked() {
    let db = common::database().await;
    let control = db.connect().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    let odd = "An \"odd\" one".to_owned();
    session.listen(vec!["a".to_owned(), odd.clone()]).await.unwrap();
    session.listen(vec!["a".to_owned(), "b".to_owned()]).await.unwrap();
    session.listen(Vec::new()).await.unwrap();
    session.notify("a".to_owned(), "mine".to_owned()).await.unwrap();
    control.execute("select pg_notify('a', 'theirs')", &[]).await.unwrap();
    session.notify("b".to_owned(), String::new()).await.unwrap();
    session.notify(odd.clone(), "o".to_owned()).await.unwrap();
    session.notify("unheard".to_owned(), "x".to_owned()).await.unwrap();
    let (other, _notifications) = connect(db.url()).await.unwrap();
    other.notify("a".to_owned(), "last".to_owned()).await.unwrap();
    for wanted in [
        rung("a", "mine", true),
        rung("a", "theirs", false),
        rung("b", "", true),
        rung(&odd, "o", true),
        rung("a", "last", false),
    ] {
        assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(wanted));
    }
}

#[tokio::test]
async fn a_channel_that_was_given_up_is_heard_no_more_and_can_be_heard_again() {
    let db = common::database().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    let odd = "*".to_owned();
    session.listen(vec!["a".to_owned(), "b".to_owned(), odd.clone()]).await.unwrap();
    session.unlisten(vec![odd.clone(), "never".to_owned()]).await.unwrap();
    session.unlisten(vec!["a".to_owned()]).await.unwrap();
    session.unlisten(Vec::new()).await.unwrap();
    for channel in ["a", "*", "b"] {
        session.notify(channel.to_owned(), "1".to_owned()).await.unwrap();
    }
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(rung("b", "1", true)), "a star is a name");
    session.listen(vec!["a".to_owned()]).await.unwrap();
    session.notify("a".to_owned(), "2".to_owned()).await.unwrap();
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(rung("a", "2", true)));
}

#[tokio::test]
async fn a_ring_that_arrives_while_nobody_waits_is_kept() {
    let db = common::database().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    session.listen(vec!["a".to_owned()]).await.unwrap();
    for n in 0..100 {
        drop(timeout(Duration::ZERO, heard.recv()).await.map(|early| panic!("{early:?} before {n}")));
    }
    session.notify("a".to_owned(), "1".to_owned()).await.unwrap();
    session.ping().await.unwrap();
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(rung("a", "1", true)));
}

#[tokio::test]
async fn a_channel_that_would_be_cut_off_is_refused_and_the_session_goes_on() {
    let db = common::database().await;
    let (session, _heard) = connect(db.url()).await.unwrap();
    let error = session.listen(vec!["x".repeat(64)]).await.expect_err("too long");
    assert!(matches!(&error, StoreError::Rejected { code, .. } if code == "42622"), "{error}");
    let error = session.notify("a".to_owned(), "x".repeat(9_000)).await.expect_err("too long");
    assert!(matches!(error, StoreError::Rejected { .. }), "{error}");
    session.ping().await.unwrap();
}

#[tokio::test]
async fn the_channel_of_an_instance_is_the_one_that_producers_ring() {
    let db = common::database().await;
    let control = db.connect().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    let channel = session.work_channel(instance(1)).await.unwrap();
    assert_eq!(channel, format!("wh_work_{}", instance(1)));
    beat(&control, instance(1), false).await;
    session.listen(vec![channel.clone()]).await.unwrap();
    super::run(&control, "select wh_ring_members('orphan')").await;
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(rung(&channel, "orphan", false)));
}

#[tokio::test]
async fn a_killed_backend_ends_the_notifications_and_every_later_call() {
    let db = common::database().await;
    let control = db.connect().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    let start = Instant::now();
    assert_eq!(kill_sessions(&control).await, 1);
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), None);
    println!("a killed backend is noticed after {:?}", start.elapsed());
    assert_eq!(heard.recv().await, None, "once and for all");
    let error = session.ping().await.expect_err("the session has ended");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
}

#[tokio::test]
async fn an_unanswered_ping_ends_a_session_whose_link_is_silent() {
    let db = common::database().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let proxy = Proxy::to(socket).await.expect("a proxy");
    let url = format!("postgresql://postgres@{}/{}", proxy.address(), db.name());
    let (session, mut heard) = connect(&url).await.unwrap();
    session.ping().await.unwrap();
    proxy.hold_all();
    let start = Instant::now();
    let error = session.ping().await.expect_err("nothing comes back");
    assert_eq!(
        error.to_string(),
        "database unavailable: no answer to the ping within 6 s: the session is ended"
    );
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), None);
    let took = start.elapsed();
    println!("a silent link is noticed after {took:?}");
    assert!((Duration::from_secs(6)..Duration::from_secs(12)).contains(&took), "{took:?}");
    let (again, _heard) = connect(&url).await.expect("the next session passes");
    again.ping().await.unwrap();
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_unavailable() {
    let error = connect("postgresql://postgres@127.0.0.1:1/x").await.err().expect("nobody there");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    assert!(error.is_transient());
}

#[tokio::test]
async fn a_schema_without_the_functions_of_the_lock_says_so() {
    let db = common::empty_database().await;
    let (session, _heard) = connect(db.url()).await.unwrap();
    let error = session.claim_alive_lock(instance(1)).await.expect_err("no function");
    assert!(matches!(error, StoreError::Schema(_)), "{error}");
    session.ping().await.unwrap();
}
