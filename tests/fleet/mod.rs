//! Relays as processes of their own, which tests kill, stop and wake, and what the database says of them.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_postgres::types::FromSqlOwned;
use uuid::Uuid;

use crate::common::wait::eventually;

/// Where a relay writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Nowhere: it relays as fast as it can.
    Nowhere,
    /// A pipe that nobody reads: it leases rows, and can neither finish nor lose them.
    Stuck,
}

/// One process.
#[derive(Debug)]
pub struct Relay {
    child: Child,
    stdout: Option<ChildStdout>,
    log: PathBuf,
    /// Its first id.
    pub id: Uuid,
}

/// The command line of a relay, without anything of this process's environment that would change it.
pub fn command(program: &Path, url: &str, to: To, options: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WORKPUMP_") {
            command.env_remove(name);
        }
    }
    command.env("WORKPUMP_DATABASE_URL", url).env("RUST_LOG", "workpump=debug,workpump_actors=debug");
    // What is free is found at once: the tests measure how soon it becomes free.
    command.env("WORKPUMP_CLAIM_POLLING_INTERVAL_MILLISECONDS", "50");
    command.env("WORKPUMP_CLAIM_POLLING_MAX_INTERVAL_MILLISECONDS", "50");
    command.envs(options.iter().copied());
    let (path, stdout) = match to {
        To::Nowhere => ("/dev/null", Stdio::null()),
        To::Stuck => ("-", Stdio::piped()),
    };
    command.args(["relay", "--to", path]).stdin(Stdio::null()).stdout(stdout);
    command
}

/// The program under test.
pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_workpump"))
}

impl Relay {
    /// Starts one and waits until it is a member. `options` are variables of its environment.
    pub async fn start(control: &Client, url: &str, to: To, options: &[(&str, &str)]) -> Self {
        Self::start_as(control, command(program(), url, to, options)).await
    }

    /// The same for a command that ends up as a relay in the process it starts.
    pub async fn start_as(control: &Client, command: Command) -> Self {
        let mut relay = Self::spawn(command);
        relay.join(control).await;
        relay
    }

    /// Starts one; [`Relay::join`] waits until it is a member.
    pub fn spawn(mut command: Command) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let log =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("relay-{}-{number}.log", std::process::id()));
        let mut child = command.stderr(File::create(&log).expect("a log")).spawn().expect("the relay starts");
        let stdout = child.stdout.take();
        Self { child, stdout, log, id: Uuid::nil() }
    }

    pub async fn join(&mut self, control: &Client) {
        let sql = format!(
            "select instance_id from wh_service_instances where process_id = {} order by started_at desc",
            self.pid()
        );
        let mut found = None;
        eventually("a relay joins", async || {
            found = control.query_opt(&format!("{sql} limit 1"), &[]).await.expect("members");
            if let Some(status) = self.child.try_wait().expect("its state") {
                panic!("a relay ended while it started: {status}\n{}", self.log());
            }
            found.is_some()
        })
        .await;
        self.id = found.expect("just seen").get(0);
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.pid());
        assert!(Command::new("/bin/sh").args(["-c", &kill]).status().expect("a shell").success(), "{kill}");
    }

    /// `kill -9`; returns when it was sent.
    pub fn kill(&mut self) -> Instant {
        self.child.kill().expect("kill -9");
        let at = Instant::now();
        self.child.wait().expect("its end");
        at
    }

    /// Reads what it writes from now on, and throws it away: it is stuck no longer.
    pub fn unstick(&mut self) {
        let mut stdout = self.stdout.take().expect("a stuck relay");
        std::thread::spawn(move || {
            let mut bytes = vec![0; 64 * 1024];
            while stdout.read(&mut bytes).is_ok_and(|read| read > 0) {}
        });
    }

    /// Asks it to drain and waits for its end.
    pub async fn drain(mut self) -> ExitStatus {
        self.signal("TERM");
        let mut status = None;
        eventually("a relay drains", async || {
            status = self.child.try_wait().expect("its state");
            status.is_some()
        })
        .await;
        status.expect("just seen")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let passed = !std::thread::panicking();
        if !passed {
            eprintln!("--- log of relay {} ({}):\n{}", self.id, self.pid(), last(&self.log(), 30));
        }
        drop(self.child.kill());
        drop(self.child.wait());
        if passed {
            drop(std::fs::remove_file(&self.log));
        }
    }
}

fn last(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// One value.
pub async fn value<T: FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

/// Statements without results.
pub async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// Waits until a condition holds in the database.
pub async fn until(client: &Client, condition: &str) {
    eventually(condition, async || value(client, condition).await).await;
}

/// Stores rows of a kilobyte each, without a stream.
pub async fn store(client: &Client, rows: u32) {
    run(
        client,
        &format!(
            "insert into wh_outbox (message_type, payload) select 'n', to_jsonb(repeat('x', 1000)) from generate_series(1, {rows})"
        ),
    )
    .await;
}

/// Waits until each of these holds its alive-lock and has said so, and all of them watch each other: a death in the first moments of
/// its watcher is found by the census only.
pub async fn settled(control: &Client, relays: &[&Relay]) {
    declared(control, relays).await;
    let all = relays.len();
    let watching = format!(
        "select count(*) = {all} from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like 'CALL%wh_watch%'"
    );
    until(control, &watching).await;
}

/// Waits until each of these holds its alive-lock and has said so.
pub async fn declared(control: &Client, relays: &[&Relay]) {
    for relay in relays {
        until(
            control,
            &format!(
                "select count(*) = 1 from wh_live_instances where instance_id = '{}' and lock_declared and lock_held",
                relay.id
            ),
        )
        .await;
    }
}

/// Rows that this instance leases.
pub async fn held(control: &Client, id: Uuid) -> i64 {
    value(control, &format!("select count(*) from wh_outbox where instance_id = '{id}'")).await
}

/// Evictions so far: who, and why. Whoever left by itself is not among them.
pub async fn evictions(control: &Client) -> Vec<(Uuid, String)> {
    let sql =
        "select instance_id, reason from wh_instance_evictions where reason <> 'left' order by evicted_at";
    let rows = control.query(sql, &[]).await.expect("tombstones");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// A relay that is stuck with so many rows in hand.
pub async fn stuck_with(control: &Client, url: &str, rows: u32, options: &[(&str, &str)]) -> Relay {
    let relay = Relay::start(control, url, To::Stuck, options).await;
    store(control, rows).await;
    until(control, &format!("select count(*) = {rows} from wh_outbox where instance_id = '{}'", relay.id))
        .await;
    relay
}

/// How long after `since` the first row of the table was somebody else's than these: taken, or finished.
pub async fn taken_over(control: &Client, from: &[Uuid], rows: i64, since: Instant) -> Duration {
    let from: Vec<String> = from.iter().map(|id| format!("'{id}'")).collect();
    let taken = format!(
        "select count(*) < {rows} or coalesce(bool_or(instance_id not in ({})), false) from wh_outbox",
        from.join(", ")
    );
    until(control, &taken).await;
    since.elapsed()
}

/// The figures of a series, for the reader of a test run.
pub fn figures(what: &str, took: &mut [Duration]) -> (Duration, Duration) {
    took.sort_unstable();
    let (median, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{what}: {} runs, median {median:.2?}, worst {worst:.2?}: {took:.2?}", took.len());
    (median, worst)
}

/// A bound of the issue: strict for all runs at scale 10; at a smaller scale on a machine that does other things besides, for the median
/// with three times the time.
pub fn within(what: &str, took: &mut [Duration], bound: Duration) {
    let (median, worst) = figures(what, took);
    if crate::common::scale() >= 10 {
        assert!(worst <= bound, "{what}: worst {worst:?}, bound {bound:?}");
    } else {
        assert!(median <= bound * 3, "{what}: median {median:?}, bound {bound:?}");
    }
}
