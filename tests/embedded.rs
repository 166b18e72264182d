//! The throwaway PostgreSQL: nothing of it outlives its owner, a kill is survived with every acknowledged commit, and the fixtures
//! that all other tests stand on do what they say.

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::wait::eventually;
use workpump::embedded::{EmbeddedError, EmbeddedPostgres};

/// Set for the process that owns a server and is then killed.
const OWNER: &str = "WORKPUMP_TEST_SERVER_OWNER";

async fn count(url: &str, sql: &str) -> i64 {
    common::connect(url).await.query_one(sql, &[]).await.expect("a count").get(0)
}

#[tokio::test]
async fn each_test_has_a_database_of_its_own() {
    let (one, two) = (common::database().await, common::database().await);
    one.connect().await.batch_execute("create table only_here ()").await.unwrap();
    let sql = "select count(*) from pg_class where relname = 'only_here'";
    assert_eq!(count(one.url(), sql).await, 1);
    assert_eq!(count(two.url(), sql).await, 0);
}

#[tokio::test]
async fn many_databases_are_copied_at_once() {
    let made = futures_util::future::join_all((0..8).map(|_| common::database())).await;
    let mut names: Vec<_> = made.iter().map(common::Database::name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 8);
}

#[tokio::test]
async fn a_restart_after_kill_9_keeps_every_acknowledged_commit() {
    let mut server = EmbeddedPostgres::builder().start_async().await.unwrap();
    let url = server.url("postgres");
    let client = common::connect(&url).await;
    client.batch_execute("create table kept as select generate_series(1, 500) as n").await.unwrap();
    let before = server.pid();
    server.kill_9().unwrap();
    assert_eq!(server.pid(), None);
    assert!(tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_err());
    server.restart().unwrap();
    assert_ne!(server.pid(), before);
    assert_eq!(count(&url, "select count(*) from kept").await, 500);
    server.stop_immediately().unwrap();
    server.restart().unwrap();
    server.restart().unwrap();
    assert_eq!(count(&url, "select count(*) from kept").await, 500);
}

#[test]
fn dropping_a_server_leaves_no_process_and_no_directory() {
    let server = EmbeddedPostgres::start().unwrap();
    let (dir, pid) = (server.socket_dir().to_owned(), server.pid().unwrap());
    drop(server);
    assert!(!dir.exists());
    assert!(!is_alive(pid));
}

#[test]
fn a_setting_that_the_server_refuses_is_reported_with_its_log() {
    let refused = EmbeddedPostgres::builder().setting("no_such_setting", "1").start().unwrap_err();
    assert!(matches!(refused, EmbeddedError::Ended { .. }), "{refused:?}");
    assert!(refused.to_string().contains("no_such_setting"), "{refused}");
}

#[tokio::test]
async fn the_pooler_lets_statements_through_and_shares_sessions() {
    let db = common::database().await;
    let Some(bouncer) = common::Bouncer::in_front_of(&common::shared().postgres, 1).await else { return };
    let (one, two) =
        (common::connect(&bouncer.url(db.name())).await, common::connect(&bouncer.url(db.name())).await);
    let pid = "select pg_backend_pid()";
    let first: i32 = one.query_typed(pid, &[]).await.unwrap()[0].get(0);
    let second: i32 = two.query_typed(pid, &[]).await.unwrap()[0].get(0);
    assert_eq!(first, second, "a pool of one has one session");
}

/// Not a test by itself: the process that the next test kills. It owns a server and waits for its end.
#[test]
fn owner_of_a_server() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let server = EmbeddedPostgres::start().unwrap();
    eprintln!("owner {} {}", server.pid().unwrap(), server.socket_dir().display());
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn an_owner_killed_with_sigkill_leaves_no_server_and_no_directory() {
    let mut owner = Command::new(std::env::current_exe().unwrap());
    owner.args(["--exact", "owner_of_a_server", "--nocapture"]).env(OWNER, "1");
    let mut owner = owner.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(owner.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|line| line.starts_with("owner ")).expect("the owner reports its server");
    let mut words = line.split(' ').skip(1);
    let (pid, dir) = (words.next().unwrap().parse().unwrap(), PathBuf::from(words.next().unwrap()));
    assert!(is_alive(pid) && dir.exists());
    owner.kill().unwrap();
    owner.wait().unwrap();
    eventually("the end of the server and its directory", async || !is_alive(pid) && !dir.exists()).await;
}

/// Whether the process runs; one that ended and is not yet reaped does not.
fn is_alive(pid: u32) -> bool {
    if let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        return !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'));
    }
    if std::fs::exists("/proc/self").unwrap_or(false) {
        return false;
    }
    let listed = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().expect("ps runs");
    let state = String::from_utf8_lossy(&listed.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}
