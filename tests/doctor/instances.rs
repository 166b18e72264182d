//! Members and their work.

use workpump::doctor::Severity::{Note, Ok as Well, Warning};

use super::common;
use super::{assert_healthy, examine, of, only, problems, run};

const ONE: &str = "018f0000-0000-7000-8000-000000000001";
const TWO: &str = "018f0000-0000-7000-8000-000000000002";

fn beat(instance: &str, metadata: &str) -> String {
    format!("select record_heartbeat('{instance}', 'shop', 'host', 7, '{metadata}', 60, false)")
}

#[tokio::test]
async fn members_that_are_stale_deaf_or_of_another_version_are_named() {
    let db = common::database().await;
    let client = db.connect().await;
    run(
        &client,
        &beat(
            ONE,
            "{\"gate\": \"unavailable\", \"gate_reason\": \"not heard\", \"library_version\": \"0.0.1\"}",
        ),
    )
    .await;
    run(&client, &beat(TWO, "{\"gate\": \"available\"}")).await;
    run(&client, &format!("update wh_service_instances set last_heartbeat_at = now() - interval '10 minutes' where instance_id = '{TWO}'"))
        .await;
    let diagnosis = examine(db.url()).await;
    assert_eq!(only(&diagnosis, "instances.members", Well).seen, "1 of 2 members are alive");
    let stale = only(&diagnosis, "instances.stale", Warning);
    assert!(stale.seen.contains(TWO) && stale.seen.contains("10 min"), "{stale:?}");
    let gate = only(&diagnosis, "instances.gate", Warning);
    assert!(gate.subject.as_deref() == Some(ONE) && gate.seen.ends_with(": not heard"), "{gate:?}");
    assert!(only(&diagnosis, "instances.versions", Note).seen.contains("0.0.1"));
}

#[tokio::test]
async fn a_running_pump_is_healthy() {
    let db = common::database().await;
    let pump = workpump::WorkPump::builder(db.url())
        .options(common::quick())
        .handler("a", Nothing)
        .start()
        .await
        .expect("a pump");
    let diagnosis = examine(db.url()).await;
    assert_healthy(&diagnosis);
    assert_eq!(only(&diagnosis, "instances.members", Well).seen, "1 of 1 members are alive");
    pump.drain().await;
}

struct Nothing;

impl workpump::Handler<serde_json::Value> for Nothing {
    async fn handle(
        &self,
        _: &mut workpump::Context<'_>,
        _: serde_json::Value,
    ) -> Result<(), workpump::Failure> {
        Ok(())
    }
}

#[tokio::test]
async fn work_without_an_instance_stuck_work_and_dead_letters_are_found() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "insert into wh_outbox (message_type, payload) values ('a', '{}')").await;
    let diagnosis = examine(db.url()).await;
    assert!(only(&diagnosis, "instances.stuck_work", Warning).seen.contains("no instance is alive"));

    run(&client, &beat(ONE, "{}")).await;
    assert_healthy(&examine(db.url()).await);
    run(
        &client,
        &format!(
            "insert into wh_inbox (message_type, payload, instance_id, lease_expiry) values \
             ('a', '{{}}', '{ONE}', clock_timestamp() - interval '2 minutes'), ('a', '{{}}', '{TWO}', clock_timestamp() + interval '1 hour'); \
             insert into wh_dead_letters (category, work_id, row_snapshot, failure_reason, attempts, crash_count) \
             values ('inbox', '{ONE}', '{{}}', 1, 1, 0)"
        ),
    )
    .await;
    let diagnosis = examine(db.url()).await;
    let seen: Vec<_> =
        of(&diagnosis, "instances.stuck_work").iter().map(|finding| finding.seen.as_str()).collect();
    assert_eq!(
        seen,
        [
            "1 rows of inbox are leased although their leases ended more than a minute ago",
            "1 rows of inbox are leased to somebody who is no member"
        ]
    );
    assert_eq!(only(&diagnosis, "instances.dead_letters", Note).seen, "dead letters: 1 of inbox");
}

#[tokio::test]
async fn a_release_that_nobody_finishes_is_found() {
    let db = common::database().await;
    let client = db.connect().await;
    let bury = format!(
        "insert into wh_instance_evictions (instance_id, reason, evicted_at) values ('{ONE}', 'x', clock_timestamp() - interval '1 hour')"
    );
    run(&client, &bury).await;
    let diagnosis = examine(db.url()).await;
    assert!(only(&diagnosis, "instances.release", Warning).seen.contains("1 evicted instances"));
    assert_eq!(problems(&diagnosis), ["instances.release"]);
}
