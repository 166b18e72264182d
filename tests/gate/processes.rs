//! A relay of its own while its database is away: it is quiet, and it says so once.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::common::proxy::{Flow, Proxy};
use crate::common::{self, scale, wait::eventually};
use crate::fleet::{Relay, To, command, declared, program, store, until};

/// Seconds of the processor that a process has used.
fn cpu(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a living process");
    // After the name, which may hold anything, in parentheses: the fields from the third.
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime");
    // USER_HZ is 100 on every Linux there is.
    ticks as f64 / 100.0
}

#[tokio::test]
async fn a_relay_whose_database_is_down_uses_hardly_any_processor_time() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let control = db.connect().await;
    let mut relay = command(program(), db.url(), To::Nowhere, &[]);
    relay.env("RUST_LOG", "workpump=info,workpump_actors=info");
    let relay = Relay::start_as(&control, relay).await;
    declared(&control, &[&relay]).await;
    server.postgres.stop().expect("stopped");
    // The outage itself: a minute at full length.
    let (from, since) = (cpu(relay.pid()), Instant::now());
    sleep(Duration::from_secs(u64::from(10 * scale().min(6)))).await;
    let share = (cpu(relay.pid()) - from) / since.elapsed().as_secs_f64();
    println!("{:.2} % of a processor while the database is down", share * 100.0);
    assert!(share < 0.05, "{:.1} %", share * 100.0);
    server.postgres.restart().expect("restarted");
    let control = db.connect().await;
    store(&control, 10).await;
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert!(relay.drain().await.success());
}

#[tokio::test]
async fn a_listener_closed_in_good_order_is_told_in_one_line() {
    let db = common::database().await;
    let control = db.connect().await;
    let socket = common::shared().postgres.socket_dir().join(".s.PGSQL.5432");
    let door = Proxy::to(socket).await.expect("a door");
    let direct = crate::rig::through(&door, &db);
    let mut relay = command(program(), db.url(), To::Nowhere, &[("WORKPUMP_DIRECT_URL", &direct)]);
    relay.env("RUST_LOG", "workpump=info,workpump_actors=info");
    let relay = Relay::start_as(&control, relay).await;
    declared(&control, &[&relay]).await;
    eventually("a listener", async || door.listened() == (1, 1)).await;
    let before = relay.log().lines().count();
    assert_eq!(door.listeners(Flow::Close), 1);
    eventually("the next listener", async || door.listened() == (1, 2)).await;
    declared(&control, &[&relay]).await;
    // What is still to be said is said before the answer to work.
    store(&control, 1).await;
    until(&control, "select count(*) = 0 from wh_outbox").await;
    let log = relay.log();
    let said: Vec<&str> =
        log.lines().skip(before).filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert_eq!(said.len(), 1, "{said:#?}");
    assert!(relay.drain().await.success());
}
