//! Who answers: servers, poolers, nobody.

use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::Instant;
use workpump::doctor::Severity::{Error, Ok as Well, Warning};

use super::common::proxy::Proxy;
use super::common::{self, Bouncer};
use super::{assert_healthy, examine, of, only, problems, run};

#[tokio::test]
async fn a_healthy_server_is_healthy_by_one_address_and_by_two() {
    let db = common::database().await;
    assert_healthy(&examine(db.url()).await);
    let diagnosis = workpump::doctor(db.url(), Some(db.url()), "public").await.expect("a diagnosis");
    assert_healthy(&diagnosis);
    for check in
        ["connections.direct", "connections.same_database", "connections.notify", "server.keepalives"]
    {
        only(&diagnosis, check, Well);
    }
    assert_eq!(diagnosis.counts.ok + diagnosis.counts.notes, diagnosis.findings.len());
}

#[tokio::test]
async fn a_pooler_without_a_way_past_it_is_a_warning_and_with_one_it_is_well() {
    let db = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 4).await else { return };
    let url = bouncer.url(db.name());
    let diagnosis = examine(&url).await;
    let pooling = only(&diagnosis, "connections.pooling", Warning);
    assert!(pooling.seen.contains("in transaction mode"), "{pooling:?}");
    assert!(
        pooling.next_step.as_deref().is_some_and(|step| step.contains("WORKPUMP_DIRECT_URL")),
        "{pooling:?}"
    );
    assert_eq!(problems(&diagnosis), ["connections.pooling"]);
    assert!(of(&diagnosis, "connections.notify").is_empty(), "there is nobody to hear it");

    let diagnosis = workpump::doctor(&url, Some(db.url()), "public").await.expect("a diagnosis");
    assert_healthy(&diagnosis);
    only(&diagnosis, "connections.pooling", Well);
    only(&diagnosis, "connections.notify", Well);
}

#[tokio::test]
async fn a_direct_url_that_is_a_pooler_is_an_error() {
    let db = common::database().await;
    // The second pooler swallows start-up options instead of refusing them.
    for settings in ["", "ignore_startup_parameters = options"] {
        let Some(bouncer) = Bouncer::with_settings(&common::shared().postgres, 4, settings).await else {
            return;
        };
        let url = bouncer.url(db.name());
        let diagnosis = workpump::doctor(&url, Some(&url), "public").await.expect("a diagnosis");
        let direct = only(&diagnosis, "connections.direct", Error);
        assert!(direct.seen.contains("pooler"), "{direct:?}");
        assert_eq!(problems(&diagnosis), ["connections.direct"], "{settings}");
    }
}

#[tokio::test]
async fn modes_of_a_pooler_are_told_apart() {
    let db = common::database().await;
    let server = &common::shared().postgres;
    let Some(session) = Bouncer::with_settings(server, 4, "pool_mode = session").await else { return };
    let diagnosis =
        workpump::doctor(&session.url(db.name()), Some(db.url()), "public").await.expect("a diagnosis");
    assert!(only(&diagnosis, "connections.pooling", Well).seen.contains("session mode"));
    assert_healthy(&diagnosis);

    let Some(statement) = Bouncer::with_settings(server, 4, "pool_mode = statement").await else { return };
    let diagnosis =
        workpump::doctor(&statement.url(db.name()), Some(db.url()), "public").await.expect("a diagnosis");
    let pooling = only(&diagnosis, "connections.pooling", Error);
    assert!(pooling.next_step.as_deref().is_some_and(|step| step.contains("pool_mode")), "{pooling:?}");
}

#[tokio::test]
async fn a_direct_url_to_another_database_is_found_and_nothing_is_heard_there() {
    let (one, other) = (common::database().await, common::database().await);
    let diagnosis = workpump::doctor(one.url(), Some(other.url()), "public").await.expect("a diagnosis");
    let same = only(&diagnosis, "connections.same_database", Error);
    assert!(same.seen.contains(other.name()) && same.seen.contains(one.name()), "{same:?}");
    only(&diagnosis, "connections.notify", Error);
    assert_eq!(problems(&diagnosis), ["connections.same_database", "connections.notify"]);
}

#[tokio::test]
async fn a_direct_url_to_another_server_is_found() {
    let db = common::database().await;
    let elsewhere = common::server_with(&[]);
    let other = elsewhere.database().await;
    let diagnosis = workpump::doctor(db.url(), Some(other.url()), "public").await.expect("a diagnosis");
    assert!(only(&diagnosis, "connections.same_database", Error).seen.contains("another server"));
    only(&diagnosis, "connections.notify", Error);
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_a_finding_with_its_cause() {
    let nowhere = "postgresql://me:s3cret@127.0.0.1:1/x";
    let diagnosis = examine(nowhere).await;
    let database = only(&diagnosis, "connections.database", Error);
    assert!(database.seen.contains("refused"), "{database:?}");
    assert_eq!(diagnosis.findings.len(), 1, "there is nothing else to ask");

    let db = common::database().await;
    let diagnosis = workpump::doctor(db.url(), Some(nowhere), "public").await.expect("a diagnosis");
    only(&diagnosis, "connections.direct", Error);
    assert_eq!(problems(&diagnosis), ["connections.direct"], "the rest was looked at");
    assert!(!serde_json::to_string(&diagnosis).expect("JSON").contains("s3cret"));
}

#[tokio::test]
async fn a_server_that_accepts_and_stays_silent_does_not_hold_the_doctor_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("postgresql://me@{}/x", listener.local_addr().expect("its address"));
    let start = Instant::now();
    let diagnosis = workpump::doctor(&url, Some(&url), "public").await.expect("a diagnosis");
    assert!(only(&diagnosis, "connections.database", Error).seen.contains("no answer to the login"));
    only(&diagnosis, "connections.direct", Error);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_locked_table_is_a_finding_and_the_others_go_on() {
    let db = common::database().await;
    let locker = db.connect().await;
    run(&locker, "begin; lock table wh_service_instances in access exclusive mode").await;
    let start = Instant::now();
    let diagnosis = examine(db.url()).await;
    let unknown = only(&diagnosis, "instances.members", Warning);
    assert!(unknown.seen.contains("could not be checked") && unknown.seen.contains("timeout"), "{unknown:?}");
    only(&diagnosis, "instances.dead_letters", Well);
    only(&diagnosis, "activity.notification_queue", Well);
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    run(&locker, "rollback").await;
}

#[tokio::test]
async fn a_login_that_is_refused_names_the_cause() {
    let db = common::database().await;
    let diagnosis = examine(&db.url_as("nobody_of_that_name")).await;
    let database = only(&diagnosis, "connections.database", Error);
    assert!(
        database.seen.contains("nobody_of_that_name") && database.seen.contains("does not exist"),
        "{database:?}"
    );
}

#[tokio::test]
async fn a_link_through_a_proxy_of_bytes_is_no_pooler() {
    let db = common::database().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let proxy = Proxy::to(socket).await.expect("a proxy");
    let url = format!("postgresql://postgres@{}/{}", proxy.address(), db.name());
    assert_healthy(&examine(&url).await);
}

#[tokio::test]
async fn addresses_and_names_that_cannot_be_read_are_errors_of_their_own() {
    let db = common::database().await;
    let bad = workpump::doctor("postgresql://me:s3cret@h:port/x", None, "public")
        .await
        .expect_err("no port")
        .to_string();
    assert!(bad.starts_with("the database URL cannot be read") && !bad.contains("s3cret"), "{bad}");
    let bad = workpump::doctor(db.url(), Some("postgresql://me:s3cret@h:port/x"), "public")
        .await
        .expect_err("no port");
    assert!(bad.to_string().starts_with("the direct URL cannot be read"), "{bad}");
    let bad = workpump::doctor(db.url(), None, "").await.expect_err("no name");
    assert!(bad.to_string().contains("is empty"), "{bad}");
}
