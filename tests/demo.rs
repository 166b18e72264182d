//! The demo on input that nobody made easy: everything that can be relayed is, everything else is refused by line and reason, and
//! nothing stays behind, however it ends.

#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::wait::eventually;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};

fn workpump() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_workpump"));
    for name in
        ["WORKPUMP_DATABASE_URL", "WORKPUMP_DIRECT_URL", "WORKPUMP_SCHEMA", "WORKPUMP_CONFIG", "RUST_LOG"]
    {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs the demo with `--json`; the report must be the only thing on standard output.
fn demo(arguments: &[&str]) -> (Value, Output) {
    let output = workpump().args(["demo", "--json"]).args(arguments).output().expect("the program runs");
    let text = String::from_utf8(output.stdout.clone()).expect("text");
    let report = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text:?}\n{}", String::from_utf8_lossy(&output.stderr)));
    (report, output)
}

/// A file for one test, with this content.
fn input(name: &str, content: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, content).expect("a test file");
    path
}

#[track_caller]
fn assert_figures(report: &Value, figures: &[(&str, u64)]) {
    for (name, expected) in figures {
        assert_eq!(report[name], *expected, "{name} in {report}");
    }
}

#[test]
fn generated_orders_are_relayed_once_and_in_order() {
    let (report, output) = demo(&["--messages", "3000", "--streams", "70", "--instances", "3"]);
    assert_figures(
        &report,
        &[("messages", 3_000), ("enqueued", 3_000), ("processed", 3_000), ("streams", 70), ("instances", 3)],
    );
    assert_figures(
        &report,
        &[("lost", 0), ("duplicates", 0), ("order_violations", 0), ("redelivered", 0), ("refused", 0)],
    );
    for name in ["enqueue_per_second", "process_per_second", "elapsed_ms"] {
        assert!(report[name].as_f64().unwrap() > 0.0, "{name} in {report}");
    }
    assert!(output.status.success());
}

#[test]
fn a_file_that_nobody_made_easy_is_relayed_or_refused_line_by_line() {
    let mut lines: Vec<Vec<u8>> = Vec::new();
    let mut line = |text: &str| lines.push(text.as_bytes().to_vec());
    line("\u{feff}{\"order\":{\"id\":\"α-1\"},\"note\":\"byte order mark\"}\r"); // 1
    line(r#"{"order":{"id":"α-1"},"deep":{"er":[{"and":[[[]]]},null,1e30]}}"#);
    line(""); // 3: empty, not a message
    line(r#"{"order":{"id":17},"text":"Ünïcödé 東京 🦀 \u00e9 \ud83e\udd80 \n\t\"quoted\""}"#);
    line(r#"{"order":{"id":"α-1"},"broken":"#); // 5: invalid
    line(r#"{"order":{}}"#); // 6: no key
    line(r#"{"order":{"id":null}}"#); // 7: no key either
    line(r#"{"order":{"id":"n"},"nul":"a\u0000b"}"#); // 8: PostgreSQL cannot store it
    line(r#"{"order":{"id":"n"},"half":"\ud83e"}"#); // 9: half a character
    line(&format!(r#"{{"order":{{"id":"big"}},"mb":"{}"}}"#, "x".repeat(1_000_000)));
    line(&format!(r#"{{"order":{{"id":"big"}},"too":"{}"}}"#, "x".repeat(9_000_000))); // 11: oversized
    line("   \t "); // 12: empty
    line(&format!(r#"{{"order":{{"id":"deep"}},"a":{}{}}}"#, "[".repeat(5_000), "]".repeat(5_000))); // 13: too deep
    line("[1,2,3]"); // 14: no object
    line(r#"{"order":{"id":"big"},"after":"the big one"}"#);
    line(r#"{"order":{"id":""},"key":"empty text is a key"}"#);
    lines.push(b"{\"order\":{\"id\":\"latin\"},\"byte\":\"\xe9\"}".to_vec()); // 17: no UTF-8
    lines.push(br#"{"order":{"id":"last"},"end":"without a line end"}"#.to_vec());
    let path = input("nasty.jsonl", &lines.join(&b'\n'));

    let (report, output) = demo(&["--input", path.to_str().unwrap(), "--stream-key", "order.id"]);

    assert_figures(
        &report,
        &[("messages", 16), ("enqueued", 7), ("processed", 7), ("refused", 9), ("streams", 5)],
    );
    assert_figures(&report, &[("lost", 0), ("duplicates", 0), ("order_violations", 0)]);
    assert!(output.status.success(), "a refused line is not a lost one");
    let errors = String::from_utf8_lossy(&output.stderr);
    let refused: Vec<u64> =
        report["refusals"].as_array().unwrap().iter().map(|one| one["line"].as_u64().unwrap()).collect();
    assert_eq!(refused, [5, 6, 7, 8, 9, 11, 13, 14, 17]);
    for (number, reason) in [
        (5, "not JSON"),
        (6, "no field"),
        (7, "null"),
        (8, "\\u0000"),
        (9, "surrogate"),
        (11, "bytes"),
        (13, "nested"),
        (14, "not an object"),
        (17, "UTF-8"),
    ] {
        let said = errors.lines().find(|text| text.starts_with(&format!("line {number} refused: ")));
        assert!(said.is_some_and(|text| text.contains(reason)), "line {number}, {reason}: {errors}");
    }
}

#[test]
fn lines_without_a_key_are_relayed_without_an_order() {
    let path = input("any.jsonl", b"1\n\"two\"\nnull\n[4]\n{\"five\":5}\n");
    let (report, output) = demo(&["--input", path.to_str().unwrap(), "--instances", "1"]);
    assert_figures(&report, &[("messages", 5), ("processed", 5), ("streams", 0), ("instances", 1)]);
    assert!(output.status.success());
}

#[test]
fn an_empty_file_is_no_trouble() {
    let path = input("empty.jsonl", b"");
    let (report, output) = demo(&["--input", path.to_str().unwrap(), "--instances", "1"]);
    assert_figures(&report, &[("messages", 0), ("processed", 0), ("lost", 0)]);
    assert!(output.status.success());
}

#[test]
fn what_cannot_work_is_said_before_anything_starts() {
    for (arguments, expected) in [
        (&["--input", "/no/such/file.jsonl"][..], "/no/such/file.jsonl"),
        (&["--input", env!("CARGO_MANIFEST_DIR")], "is a directory"),
        (&["--instances", "0"], "--instances"),
        (&["--streams", "0"], "--streams"),
        (&["--stream-key", "id"], "--input"),
        (&["--database-url", "postgresql://me:s3cret@127.0.0.1:1/x"], "cannot connect"),
        (&["--database-url", "postgresql:/me:s3cret@"], "URL cannot be read"),
    ] {
        let output = workpump().arg("demo").args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(expected), "{arguments:?}: {errors}");
        assert!(!errors.contains("s3cret"), "{errors}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn without_server_programs_the_one_line_to_install_them_is_said() {
    let output = workpump().arg("demo").env("WORKPUMP_PG_BIN", "/no/such/bin").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("/no/such/bin") && errors.contains("install"), "{errors}");
    assert_eq!(output.status.code(), Some(1));
}

#[tokio::test]
async fn a_database_of_the_users_is_left_as_it_was() {
    let database = common::database().await;
    let client = database.connect().await;
    let ours = "insert into wh_outbox (message_type, payload) values ('ours', '1')";
    client.batch_execute(ours).await.unwrap();
    let schemas =
        "select array_agg(nspname::text order by 1) from pg_namespace where nspname !~ '^pg_(toast_)?temp'";
    let before: Vec<String> = client.query_one(schemas, &[]).await.unwrap().get(0);

    let url = database.url().to_owned();
    let (report, output) = tokio::task::spawn_blocking(move || {
        demo(&["--messages", "300", "--streams", "5", "--database-url", &url])
    })
    .await
    .unwrap();

    assert_figures(&report, &[("processed", 300), ("lost", 0), ("duplicates", 0), ("order_violations", 0)]);
    assert!(output.status.success());
    let after: Vec<String> = client.query_one(schemas, &[]).await.unwrap().get(0);
    assert_eq!(before, after);
    let left: i64 =
        client.query_one("select count(*) from wh_outbox where attempts = 0", &[]).await.unwrap().get(0);
    assert_eq!(left, 1, "a message of the user's own was touched");
}

#[tokio::test]
async fn a_demo_that_is_interrupted_or_killed_leaves_nothing_behind() {
    for signal in ["INT", "TERM", "KILL"] {
        let mut command = tokio::process::Command::from(workpump());
        // More than can be done until the signal.
        command.args(["demo", "--messages", "5000000", "--instances", "2"]).env("RUST_LOG", "workpump=debug");
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.contains("instances are up") {
                break;
            }
        }
        // Read on: a demo whose log nobody takes would stand still, and with it its end.
        let log = tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let pid = child.id().unwrap();
        let descendants = descendants_of(pid);
        assert!(descendants.len() >= 3, "a server and two relays: {descendants:?}");
        let killed = Command::new("/bin/sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap();
        assert!(killed.success());
        let status = child.wait().await.unwrap();
        log.abort();
        if signal != "KILL" {
            assert_eq!(status.code(), Some(130), "{signal}");
        }
        eventually("the end of all processes of the demo", async || {
            descendants.iter().all(|pid| !is_running(*pid))
        })
        .await;
    }
}

/// The processes below one, by `/proc`; where there is none, nothing can be said.
fn descendants_of(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let by_threads =
        threads.map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let mut found: Vec<u32> = std::iter::once(children)
        .chain(by_threads)
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>())
        .collect();
    found.sort_unstable();
    found.dedup();
    let below: Vec<u32> = found.iter().flat_map(|pid| descendants_of(*pid)).collect();
    found.extend(below);
    found
}

/// Whether it is there and did not end; one that nobody has reaped yet has ended.
fn is_running(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

#[test]
fn an_instance_that_is_killed_in_mid_run_costs_a_moment_and_no_message() {
    // The fewest instances there may be, a file with its length in bytes, and more of both.
    let orders: Vec<String> =
        (0..6_000).map(|n| format!(r#"{{"order":{},"text":"{}"}}"#, n % 90, "x".repeat(n % 700))).collect();
    let path = input("orders_to_kill_in.jsonl", orders.join("\n").as_bytes());
    let file = ["--input", path.to_str().unwrap(), "--stream-key", "order", "--instances", "2"];
    let generated = ["--messages", "12000", "--streams", "150", "--instances", "4"];
    for arguments in [&file[..], &generated] {
        let output = workpump()
            .env("WORKPUMP_LIVENESS_LOCK_LOSS_GRACE_SECONDS", "1")
            .args(["demo", "--json", "--kill"])
            .args(arguments)
            .output()
            .expect("the program runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
        assert_figures(
            &report,
            &[
                ("lost", 0),
                ("duplicates", 0),
                ("order_violations", 0),
                ("false_evictions", 0),
                ("instances_died", 1),
            ],
        );
        let takeover =
            report["takeover_ms"].as_u64().unwrap_or_else(|| panic!("nothing was taken over: {report}"));
        println!("takeover after {takeover} ms, {} redelivered", report["redelivered"]);
        // Before the end of the grace there is none; how long after it is the machine's affair, as long as it is not the end of a lease.
        assert!((1_000..60_000).contains(&takeover), "{report}");
        assert!(output.status.success(), "{report}");
        assert!(errors.contains("kill -9 of instance "), "it says when it kills: {errors}");
    }
}

#[test]
fn one_instance_is_not_killed_because_nobody_could_take_over() {
    let output = workpump().args(["demo", "--kill", "--instances", "1"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("--instances 2 or more"), "{errors}");
    assert!(output.stdout.is_empty());
}
