//! A host whose cable is cut: nothing is said, and its rows are with others in time.
//!
//! Runs again as a child in a network of its own, in which a relay gets another one, joined by a cable of two ends.
#![cfg(target_os = "linux")]
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::scale;
use common::wait::eventually;
use fleet::{Relay, To, evictions, program, settled, store, taken_over, until, within};
use tokio::time::Instant;

/// Set for the child.
const INSIDE: &str = "WORKPUMP_TEST_OWN_NETWORK";
const ROWS: u32 = 200;

#[tokio::test]
async fn the_rows_of_a_host_whose_link_goes_down_are_with_others_within_twenty_two_seconds() {
    if std::env::var_os(INSIDE).is_some() {
        let mut took = Vec::new();
        for run in 0..scale() {
            took.push(cut_the_link(run).await);
        }
        return within("link down", &mut took, Duration::from_secs(22));
    }
    let test = "the_rows_of_a_host_whose_link_goes_down_are_with_others_within_twenty_two_seconds";
    let child = tokio::process::Command::new("unshare")
        .args(["--net", "--"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .await;
    let output = match child {
        Ok(output) => output,
        Err(error) => return eprintln!("skipped: no network of its own can be made (unshare: {error})"),
    };
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if said.contains("unshare failed") {
        return eprintln!("skipped: no network of its own may be made ({})", said.trim());
    }
    println!("{said}");
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn sh(line: &str) {
    let status = Command::new("/bin/sh").args(["-c", line]).status().expect("a shell");
    assert!(status.success(), "{line}");
}

/// A relay on the other end of a cable, in a network of its own; it begins when the cable is there.
async fn relay_behind_a_cable(control: &tokio_postgres::Client, url: &str, run: u32) -> Relay {
    let relay = fleet::command(program(), url, To::Stuck, &[]);
    let mut command = Command::new("unshare");
    command.args(["--net", "--", "/bin/sh", "-c", "read go; exec \"$0\" \"$@\""]);
    command.arg(relay.get_program()).args(relay.get_args());
    for (name, value) in relay.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let (read, mut go) = std::io::pipe().expect("a pipe");
    command.stdin(read).stdout(Stdio::piped());
    let mut relay = Relay::spawn(command);
    let pid = relay.pid();
    let own = std::fs::read_link("/proc/self/ns/net").expect("a network");
    let its_own = || std::fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|network| network != own);
    eventually("the relay has a network of its own", async || its_own()).await;
    sh(&format!("ip link set far{run} netns {pid}"));
    let inside =
        format!("ip addr add 10.77.{run}.2/24 dev far{run}; ip link set far{run} up; ip link set lo up");
    sh(&format!("nsenter --target {pid} --net -- /bin/sh -ec '{inside}'"));
    writeln!(go, "go").expect("a waiting relay");
    relay.join(control).await;
    relay
}

async fn cut_the_link(run: u32) -> Duration {
    sh("ip link set lo up");
    sh(&format!("ip link add near{run} type veth peer name far{run}"));
    sh(&format!("ip addr add 10.77.{run}.1/24 dev near{run}; ip link set near{run} up"));
    let server = common::server_with(&[("listen_addresses", "*")]);
    let rules = server.postgres.data_dir().join("pg_hba.conf");
    let mut rules = std::fs::File::options().append(true).open(rules).expect("pg_hba.conf");
    writeln!(rules, "host all all 10.77.0.0/16 trust").expect("a rule");
    server.postgres.reload();
    let db = server.database().await;
    let control = db.connect().await;
    let url = format!("postgresql://postgres@10.77.{run}.1:5432/{}", db.name());
    let victim = relay_behind_a_cable(&control, &url, run).await;
    store(&control, ROWS).await;
    until(&control, &format!("select count(*) = {ROWS} from wh_outbox where instance_id = '{}'", victim.id))
        .await;
    let peers = [
        Relay::start(&control, db.url(), To::Nowhere, &[]).await,
        Relay::start(&control, db.url(), To::Nowhere, &[]).await,
    ];
    settled(&control, &[&victim, &peers[0], &peers[1]]).await;
    sh(&format!("ip link set near{run} down"));
    let took = taken_over(&control, &[victim.id], ROWS.into(), Instant::now()).await;
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert_eq!(evictions(&control).await, [(victim.id, "alive-lock lost".to_owned())]);
    took
}
