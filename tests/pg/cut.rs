//! A cut cable: nothing comes through, and nobody says so. Both sides have to notice by themselves, the client first.
//!
//! Runs again as a child in a network of its own, whose only link is then taken down.

use std::process::Command;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{connect, instance, value};
use crate::common;
use crate::common::wait::eventually;

/// Set for the child.
const INSIDE: &str = "WORKPUMP_TEST_OWN_NETWORK";

#[tokio::test]
async fn a_cut_link_is_noticed_by_the_client_and_then_by_the_server_within_the_limits_of_tcp() {
    if std::env::var_os(INSIDE).is_some() {
        for doorbell_in_flight in [false, true] {
            cut_the_link(doorbell_in_flight).await;
        }
        return;
    }
    let test = "a_cut_link_is_noticed_by_the_client_and_then_by_the_server_within_the_limits_of_tcp";
    let room = module_path!().split_once("::").expect("a crate and a module").1;
    let child = tokio::process::Command::new("unshare")
        .args(["--net", "--"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", &format!("{room}::{test}"), "--nocapture"])
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

fn link(state: &str) {
    let status = Command::new("ip").args(["link", "set", "lo", state]).status().expect("ip, of iproute2");
    assert!(status.success(), "the link cannot be set {state}");
}

async fn cut_the_link(doorbell_in_flight: bool) {
    link("up");
    let server = common::server_with(&[("listen_addresses", "127.0.0.1")]);
    let db = server.database().await;
    let control = db.connect().await;
    let url = format!("postgresql://postgres@127.0.0.1:5432/{}", db.name());
    let (session, mut heard) = connect(&url).await.expect("a direct session");
    session.listen(vec!["door".to_owned()]).await.unwrap();
    assert!(session.claim_alive_lock(instance(1)).await.unwrap());
    session.ping().await.unwrap();
    link("down");
    let start = Instant::now();
    let held = format!("select wh_lock_held('{}')", instance(1));
    let client = async {
        let end = timeout(Duration::from_mins(1), heard.recv()).await;
        assert_eq!(end.expect("the session ends"), None);
        start.elapsed()
    };
    let server = async {
        if doorbell_in_flight {
            sleep(Duration::from_secs(3)).await;
            control.execute("select pg_notify('door', 'outbox')", &[]).await.unwrap();
        }
        eventually("the lock's release", async || !value::<bool>(&control, &held).await).await;
        start.elapsed()
    };
    let (client, server) = futures_util::future::join(client, server).await;
    println!(
        "cut, a doorbell in flight: {doorbell_in_flight}: client after {client:?}, server after {server:?}"
    );
    assert!(client < Duration::from_secs(8), "{client:?}");
    assert!(client < server, "{client:?} {server:?}");
    assert!(server < Duration::from_secs(18), "{server:?}");
}
