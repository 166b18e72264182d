//! The command line: what a user types, what he gets, and what he must never see.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};

use common::wait::eventually;
use serde_json::{Value, json};
use uuid::Uuid;

const PASSWORD: &str = "s3cr:t@x";

fn workpump(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_workpump"));
    for name in ["WORKPUMP_DIRECT_URL", "WORKPUMP_SCHEMA", "WORKPUMP_CONFIG", "RUST_LOG"] {
        command.env_remove(name);
    }
    // Quick enough for tests; a user's default is a matter of the engine's own tests.
    command.env("WORKPUMP_CLAIM_POLLING_INTERVAL_MILLISECONDS", "20");
    command.args(arguments).env("WORKPUMP_DATABASE_URL", url).stdin(Stdio::null());
    command
}

/// Runs to the end, off the test's own thread: the connections of the test must be driven meanwhile.
async fn run(url: &str, arguments: &[&str]) -> (Output, String, String) {
    run_with(workpump(url, arguments), "").await
}

async fn run_with(mut command: Command, input: &str) -> (Output, String, String) {
    let input = input.to_owned();
    let done = tokio::task::spawn_blocking(move || {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("its input is read");
        child.wait_with_output().expect("its end")
    });
    let output = done.await.expect("no panic");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

/// A relay, started and joined.
struct Relay {
    child: Child,
    log: std::io::Lines<BufReader<ChildStderr>>,
}

impl Relay {
    fn start(url: &str, to: &str, stdout: Stdio) -> Self {
        let mut child = workpump(url, &["relay", "--to", to])
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut log = BufReader::new(child.stderr.take().expect("its log")).lines();
        let said: Vec<String> =
            log.by_ref().map_while(Result::ok).take_while(|line| !line.contains("relaying")).collect();
        assert!(child.try_wait().expect("its state").is_none(), "{}", said.join("\n"));
        Self { child, log }
    }

    /// Asks for a drain and returns how it ended and what it said.
    fn terminate(mut self) -> (ExitStatus, String) {
        let kill = Command::new("/bin/sh")
            .args(["-c", &format!("kill -TERM {}", self.child.id())])
            .status()
            .expect("a shell");
        assert!(kill.success());
        let log: Vec<String> = self.log.by_ref().map_while(Result::ok).collect();
        (self.child.wait().expect("its end"), log.join("\n"))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn temporary(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    drop(fs::remove_file(&path));
    path
}

/// The lines of a file that is written to, when there are at least so many. A file sends no event.
async fn lines_of(path: &Path, at_least: usize) -> Vec<Value> {
    let mut lines: Vec<Value> = Vec::new();
    eventually(&format!("{at_least} lines in {}", path.display()), async || {
        let text = fs::read_to_string(path).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        lines = whole.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
        lines.len() >= at_least
    })
    .await;
    lines
}

#[tokio::test]
async fn a_schema_is_created_once_and_shown() {
    let database = common::empty_database().await;
    let (output, _, err) = run(database.url(), &["status"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("workpump migrate"), "{err}");

    let (output, first, _) = run(database.url(), &["migrate", "--schema", "Odd \"name"]).await;
    assert!(output.status.success() && first.contains("applied"), "{first}");
    let (output, second, _) = run(database.url(), &["migrate", "--schema", "Odd \"name"]).await;
    assert!(output.status.success() && second.contains("nothing to do"), "{second}");

    let (output, table, _) = run(database.url(), &["status", "--schema", "Odd \"name"]).await;
    assert!(output.status.success() && table.contains("outbox") && table.contains("no instances"), "{table}");
    let (_, text, _) = run(database.url(), &["status", "--schema", "Odd \"name", "--json"]).await;
    let status: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status["instances"], json!([]));
    let names: Vec<_> = status["categories"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["category"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["outbox", "inbox", "perspective_event", "receptor"]);
}

#[tokio::test]
async fn bad_lines_are_refused_one_by_one_and_the_others_are_stored() {
    let database = common::database().await;
    let id = Uuid::from_u128(5);
    let good = format!(
        r#"{{"message_type":"a","payload":{{"n":1}},"message_id":"{id}","stream_id":"{id}","destination":"d"}}"#
    );
    let input = [
        good.as_str(),
        "not json",
        r#"{"message_type":"a"}"#,
        r#"{"message_type":"a","payload":"\u0000"}"#,
        r#"{"message_type":"a","payload":1,"stream_id":"00000000-0000-0000-0000-000000000000"}"#,
        r#"{"message_type":"a","payload":2,"scheduled_for":"2999-01-01T00:00:00Z","metadata":{"m":1}}"#,
        r#"{"message_type":"a","payload":3,"nonsense":1}"#,
        good.as_str(),
        r#"{"message_type":"b","payload":4}"#,
    ]
    .join("\n");
    let (output, out, err) = run_with(workpump(database.url(), &["enqueue", "--json"]), &input).await;
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        (&report["enqueued"], &report["refused"], &report["lines"]),
        (&json!(3), &json!(6), &json!(9))
    );
    let lines: Vec<u64> =
        report["refusals"].as_array().unwrap().iter().map(|one| one["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, [2, 3, 4, 5, 7, 8]);
    for said in [
        "line 2 refused: not JSON",
        "line 3 refused: missing field `payload`",
        "line 7 refused: unknown field `nonsense`",
    ] {
        assert!(err.contains(said), "{said}: {err}");
    }
    let client = database.connect().await;
    let sql = "select count(*), count(*) filter (where stream_id = $1 and destination = 'd'), \
               count(*) filter (where scheduled_for > '2998-01-01' and metadata = '{\"m\": 1}') from wh_outbox";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (3, 1, 1));

    let (output, out, _) = run_with(workpump(database.url(), &["enqueue"]), &good).await;
    assert!(output.status.success() && out.contains("were there before"), "{out}");
}

#[tokio::test]
async fn a_value_that_only_the_database_refuses_takes_nothing_along() {
    let database = common::database().await;
    let client = database.connect().await;
    let check = "alter table wh_outbox add constraint no_sevens check (payload <> '7' and payload <> '1777')";
    client.batch_execute(check).await.unwrap();
    let path = temporary("sevens.jsonl");
    let lines: Vec<String> =
        (1..=2_500).map(|n| format!(r#"{{"message_type":"n","payload":{n}}}"#)).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    let (output, out, err) = run(database.url(), &["enqueue", path.to_str().unwrap(), "--json"]).await;
    assert_eq!(output.status.code(), Some(3), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let refused: Vec<u64> =
        report["refusals"].as_array().unwrap().iter().map(|one| one["line"].as_u64().unwrap()).collect();
    assert_eq!((refused.as_slice(), &report["enqueued"]), (&[7, 1_777][..], &json!(2_498)));
    assert!(err.contains("no_sevens"), "{err}");
    let in_order = "select count(*) from (select payload::int as n, lag(payload::int) over (order by seq) as before from wh_outbox) w \
                    where before > n";
    assert_eq!(client.query_one(in_order, &[]).await.unwrap().get::<_, i64>(0), 0, "halving keeps the order");
}

#[tokio::test]
async fn relays_write_every_field_and_share_a_file() {
    let database = common::database().await;
    let path = temporary("shared.jsonl");
    let to = path.to_str().unwrap();
    let relays =
        [Relay::start(database.url(), to, Stdio::null()), Relay::start(database.url(), to, Stdio::null())];
    let stream = Uuid::from_u128(9);
    let mut lines = vec![format!(
        r#"{{"message_type":"order.placed","payload":{{"é":[1,2]}},"stream_id":"{stream}","destination":"shop","metadata":{{"k":"v"}}}}"#
    )];
    lines.extend((0..400).map(|n| format!(r#"{{"message_type":"n","payload":{n}}}"#)));
    let (output, _, err) = run_with(workpump(database.url(), &["enqueue"]), &lines.join("\n")).await;
    assert!(output.status.success(), "{err}");

    let relayed = lines_of(&path, 401).await;
    let first = relayed.iter().find(|line| line["message_type"] == "order.placed").unwrap();
    let mut names: Vec<_> = first.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    let expected = [
        "attempts",
        "claim_epoch",
        "destination",
        "instance_id",
        "message_id",
        "message_type",
        "metadata",
        "payload",
        "stream_id",
    ];
    assert_eq!(names, expected);
    assert_eq!((&first["payload"], &first["metadata"]), (&json!({ "é": [1, 2] }), &json!({ "k": "v" })));
    assert_eq!((&first["stream_id"], &first["destination"]), (&json!(stream.to_string()), &json!("shop")));
    assert_eq!((&first["claim_epoch"], &first["attempts"]), (&json!(1), &json!(1)));

    let (_, text, _) = run(database.url(), &["status", "--json"]).await;
    let status: Value = serde_json::from_str(&text).unwrap();
    let instances = status["instances"].as_array().unwrap();
    assert_eq!(instances.len(), 2, "{status}");
    assert!(instances.iter().all(|one| one["categories"] == json!(["outbox"])), "{status}");
    let (_, table, _) = run(database.url(), &["status"]).await;
    let runs = |line: &str| line.ends_with("runs") || line.ends_with("outbox");
    assert_eq!(table.lines().filter(|line| runs(line)).count(), 3, "{table}");
    for relay in relays {
        let (status, log) = relay.terminate();
        assert!(status.success() && log.contains("drained"), "{status}: {log}");
    }
    let (_, text, _) = run(database.url(), &["status", "--json"]).await;
    let status: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&status["instances"], &status["categories"][0]["ready"]),
        (&json!([]), &json!(0)),
        "{status}"
    );
    assert_eq!(lines_of(&path, 401).await.len(), 401, "nothing twice");
}

#[tokio::test]
async fn a_relay_to_standard_output_ends_when_its_reader_goes() {
    let database = common::database().await;
    let mut relay = Relay::start(database.url(), "-", Stdio::piped());
    let mut out = BufReader::new(relay.child.stdout.take().unwrap());
    let message = r#"{"message_type":"a","payload":1}"#;
    run_with(workpump(database.url(), &["enqueue"]), message).await;
    let read = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        out.read_line(&mut line).map(|_| line)
    });
    let line: Value = serde_json::from_str(&read.await.unwrap().unwrap()).unwrap();
    assert_eq!(line["payload"], 1);
    // The reader is dropped by now.
    run_with(workpump(database.url(), &["enqueue"]), message).await;
    let log: Vec<String> = relay.log.by_ref().map_while(Result::ok).collect();
    let status = relay.child.wait().unwrap();
    assert_eq!(status.code(), Some(1), "{log:?}");
    assert!(log.iter().any(|line| line.contains("reader of the output is gone")), "{log:?}");
    let (_, text, _) = run(database.url(), &["status", "--json"]).await;
    let status: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status["categories"][0]["dead_letters"], 0, "the message waits for the next relay: {status}");
}

#[tokio::test]
async fn mistakes_are_named_with_the_next_step() {
    let database = common::database().await;
    let url = database.url();
    for (arguments, code, expected) in [
        (&["relay", "--to", "/no/such/dir/file"][..], 1, "/no/such/dir/file"),
        (&["relay"], 2, "--to"),
        (&["status", "--schema", ""], 1, "schema name"),
        (&["enqueue", "/no/such/file"], 1, "/no/such/file"),
        (&["enqueue", "--schema", "elsewhere"], 1, "workpump migrate"),
        (&["relay", "--to", "-", "--schema", "elsewhere"], 1, "workpump migrate"),
        (&["frobnicate"], 2, "frobnicate"),
    ] {
        let (output, _, err) = run(url, arguments).await;
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
    let mut misspelt = workpump(url, &["relay", "--to", "-"]);
    misspelt.env("WORKPUMP_CLAIM_LEASE_SECOND", "5");
    let (output, _, err) = run_with(misspelt, "").await;
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("WORKPUMP_CLAIM_LEASE_SECOND") && err.contains("did you mean"), "{err}");
    let (output, _, err) = run("", &["status"]).await;
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("WORKPUMP_DATABASE_URL"), "{err}");
}

#[tokio::test]
async fn a_password_is_never_shown() {
    let database = common::database().await;
    let client = database.connect().await;
    client.batch_execute("create role lodger login").await.unwrap();
    let lodger = format!("password='{PASSWORD}' {}", keywords(&database.url_as("lodger")));
    let nowhere = format!("postgresql://me:{PASSWORD}@127.0.0.1:1/x");
    let broken = format!("postgresql://me:{PASSWORD}@host:port:99/x?password={PASSWORD}");
    for url in [lodger.as_str(), nowhere.as_str(), broken.as_str()] {
        for arguments in [
            &["migrate"][..],
            &["status"],
            &["enqueue"],
            &["relay", "--to", "-"],
            &["demo", "--messages", "1"],
            &["status", "--database-url", url],
            &["status", url],
            &["migrate", "--databse-url", url],
        ] {
            let mut command = workpump(url, arguments);
            command.env("RUST_LOG", "trace");
            let (output, out, err) = run_with(command, "").await;
            assert!(!output.status.success(), "{arguments:?}: {out}");
            for shown in [out, err] {
                assert!(!shown.contains(PASSWORD) && !shown.contains("s3cr"), "{arguments:?}: {shown}");
            }
        }
    }
}

/// A URL of these fixtures as keywords and values.
fn keywords(url: &str) -> String {
    let parts: Vec<&str> = url.trim_start_matches("postgresql://").split(['@', ':', '/']).collect();
    let [user, host, port, name] = parts[..] else { panic!("not a fixture's URL: {url}") };
    format!("user={user} host={} port={port} dbname={name}", host.replace("%2F", "/"))
}
