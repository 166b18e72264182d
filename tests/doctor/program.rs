//! `workpump doctor`: what is printed, and how it ends.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::common;
use super::run;

const PASSWORD: &str = "s3cr:t@x";

struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs the program off the test's own thread: the connections of the test must be driven meanwhile.
async fn doctor(variables: &[(&str, &str)], arguments: &[&str]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_workpump"));
    for name in
        ["WORKPUMP_DATABASE_URL", "WORKPUMP_DIRECT_URL", "WORKPUMP_SCHEMA", "WORKPUMP_CONFIG", "RUST_LOG"]
    {
        command.env_remove(name);
    }
    command.arg("doctor").args(arguments).envs(variables.iter().copied()).stdin(Stdio::null());
    let output =
        tokio::task::spawn_blocking(move || command.output()).await.expect("no panic").expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

#[tokio::test]
async fn a_healthy_database_ends_with_0_and_both_forms_say_the_same() {
    let db = common::database().await;
    let variables = [("WORKPUMP_DATABASE_URL", db.url()), ("WORKPUMP_DIRECT_URL", db.url())];
    let table = doctor(&variables, &[]).await;
    assert_eq!(table.code, Some(0), "{}{}", table.out, table.err);
    assert!(
        table.out.starts_with("schema public, workpump ") && table.out.contains(": healthy\n"),
        "{}",
        table.out
    );
    assert_eq!(table.err, "");
    let json = doctor(&variables, &["--json"]).await;
    assert_eq!(json.code, Some(0));
    let diagnosis: Value = serde_json::from_str(&json.out).expect("one JSON object");
    assert_eq!(diagnosis["healthy"], true);
    let findings = diagnosis["findings"].as_array().expect("findings");
    assert!(findings.len() > 15, "{findings:?}");
    for finding in findings {
        let check = finding["check"].as_str().expect("a check");
        let severity = finding["severity"].as_str().expect("a severity");
        let same =
            table.out.lines().any(|line| line.starts_with(severity) && line.contains(&format!(" {check} ")));
        assert!(same, "{finding} is not in the table:\n{}", table.out);
        assert_eq!(check.split('.').next(), finding["group"].as_str());
    }
}

#[tokio::test]
async fn problems_come_first_with_their_next_steps_and_end_with_3() {
    let db = common::empty_database().await;
    workpump::migrate(db.url(), "Odd \"name").await.expect("migrated");
    run(&db.connect().await, "drop index \"Odd \"\"name\".wh_outbox_due").await;
    let table = doctor(&[("WORKPUMP_DATABASE_URL", db.url()), ("WORKPUMP_SCHEMA", "Odd \"name")], &[]).await;
    assert_eq!(table.code, Some(3), "{}{}", table.out, table.err);
    let lines: Vec<&str> = table.out.lines().filter(|line| !line.is_empty()).collect();
    assert!(
        lines[0].ends_with("not healthy") && lines[1].starts_with("1 error, 0 warnings, "),
        "{}",
        table.out
    );
    assert!(
        lines[2].starts_with("error    schema.index")
            && lines[2].ends_with("index wh_outbox.wh_outbox_due is missing")
    );
    assert!(lines[3].trim_start().starts_with("why"));
    assert!(
        lines[4].contains("next  CREATE INDEX CONCURRENTLY wh_outbox_due ON \"Odd \"\"name\".wh_outbox"),
        "{}",
        table.out
    );
}

#[tokio::test]
async fn no_form_of_failure_shows_a_password() {
    let db = common::database().await;
    let nowhere = format!("postgresql://me:{PASSWORD}@127.0.0.1:1/x");
    let broken = format!("postgresql://me:{PASSWORD}@host:port:99/x?password={PASSWORD}");
    for (url, code) in [(nowhere.as_str(), 3), (broken.as_str(), 1)] {
        for (database, direct) in [(url, url), (db.url(), url)] {
            for arguments in [&[][..], &["--json"][..]] {
                let variables = [
                    ("WORKPUMP_DATABASE_URL", database),
                    ("WORKPUMP_DIRECT_URL", direct),
                    ("RUST_LOG", "trace"),
                ];
                let ended = doctor(&variables, arguments).await;
                assert_eq!(ended.code, Some(code), "{}{}", ended.out, ended.err);
                let shown = ended.out + &ended.err;
                assert!(!shown.contains("s3cr") && !shown.contains("t@x"), "{shown}");
            }
        }
    }
}

#[tokio::test]
async fn no_database_and_unknown_arguments_are_usage_errors() {
    let ended = doctor(&[], &[]).await;
    assert_eq!(ended.code, Some(2));
    assert!(ended.err.contains("WORKPUMP_DATABASE_URL"), "{}", ended.err);
    assert_eq!(doctor(&[], &["--quiet"]).await.code, Some(2));
}

#[test]
fn every_check_is_documented_and_every_documented_check_exists() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &std::path::Path| std::fs::read_to_string(path).expect("a readable file");
    let mut checks: Vec<String> = Vec::new();
    for file in std::fs::read_dir(root.join("src/doctor")).expect("a folder").flatten() {
        let text = read(&file.path());
        let names = text.split("Check(Group::").skip(1).filter_map(|part| part.split('"').nth(1));
        checks.extend(names.map(str::to_owned));
    }
    let manual = read(&root.join("docs/doctor.md"));
    let mut documented: Vec<String> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.contains('.') && !name.contains('['))
        .map(str::to_owned)
        .collect();
    checks.sort();
    documented.sort();
    assert_eq!(checks, documented);
}
