//! The arrows that must never exist, held by reading the sources. Each rule names the failure it prevents.

use std::path::{Path, PathBuf};

/// One source file: its path from the root, and its code without comments and without its unit tests.
struct Source {
    path: String,
    code: String,
}

fn sources(folder: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(&root.join(folder), &mut files);
    assert!(!files.is_empty(), "{folder} holds no source");
    files
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("a readable source");
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let code = code
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .collect::<Vec<_>>()
                .join("\n");
            Source {
                path: path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned(),
                code,
            }
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Every place in `folder` (but in files whose path holds one of `except`) where one of `words` stands.
fn places(folder: &str, except: &[&str], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for source in
        sources(folder).iter().filter(|source| !except.iter().any(|part| source.path.contains(part)))
    {
        for (number, line) in source.code.lines().enumerate() {
            for word in words.iter().filter(|word| line.contains(**word)) {
                found.push(format!("{} (code line {}): {word}", source.path, number + 1));
            }
        }
    }
    found
}

fn none(rule: &str, places: &[String]) {
    assert!(places.is_empty(), "{rule}\n  {}", places.join("\n  "));
}

const SQL: [&str; 10] = [
    "SELECT ",
    "INSERT INTO",
    "DELETE FROM",
    "UPDATE wh_",
    "\"select ",
    "\"insert into",
    "\"delete from",
    "\"update ",
    "\"drop ",
    "\"truncate ",
];

#[test]
fn the_engine_knows_no_database() {
    none(
        "actors must not know a driver or SQL",
        &places("actors/src", &[], &["tokio_postgres", "bb8", "workpump::"]),
    );
    none("actors must not hold SQL", &places("actors/src", &[], &SQL));
}

#[test]
fn policies_are_pure() {
    let impure = ["actix", "tokio::", "Instant::now", "SystemTime::now", "rand::rng", ".await", "spawn"];
    none("a policy gets values and gives a decision", &places("actors/src/policy", &[], &impure));
    let values: Vec<String> = places("actors/src", &[], &impure)
        .into_iter()
        .filter(|place| {
            place.starts_with("actors/src/work.rs") || place.starts_with("actors/src/instance.rs")
        })
        .collect();
    none("work and instance are plain values", &values);
}

#[test]
fn messages_and_ports_name_no_actor() {
    let named: Vec<String> = places("actors/src", &[], &["crate::actor", "Actor,", "Actor>", "crate::tree"])
        .into_iter()
        .filter(|place| place.starts_with("actors/src/message.rs") || place.starts_with("actors/src/port.rs"))
        .collect();
    none("neighbours meet in messages, so messages know no neighbour", &named);
}

#[test]
fn one_actor_does_not_know_another() {
    let rooms = ["claim", "dispatch", "settle", "heartbeat", "lease_renewal", "notify_gate", "stale_sweep"];
    for source in sources("actors/src/actor") {
        for other in rooms.iter().filter(|other| !source.path.contains(**other)) {
            for arrow in [format!("actor::{other}"), format!("super::{other}")] {
                assert!(
                    !source.code.contains(&arrow),
                    "{} names {arrow}: only the tree may name actors",
                    source.path
                );
            }
        }
    }
}

#[test]
fn the_registry_knows_nothing_of_the_pump() {
    let registry = sources("actors/src/registry");
    let lines =
        registry.iter().flat_map(|source| source.code.lines().map(move |line| (source.path.as_str(), line)));
    let arrows: Vec<String> = lines
        .filter(|(_, line)| line.contains("crate::") && !line.contains("crate::registry"))
        .map(|(path, line)| format!("{path}: {line}"))
        .collect();
    none("the registry could be a crate of its own", &arrows);
}

#[test]
fn postgres_knows_no_actor_and_no_face() {
    none(
        "pg implements ports and no more",
        &places(
            "src/pg",
            &[],
            &[
                "crate::pump",
                "crate::cli",
                "workpump_actors::actor",
                "workpump_actors::tree",
                "crate::handler",
            ],
        ),
    );
}

#[test]
fn the_command_line_uses_the_face_as_users_do() {
    none(
        "cli must not reach into pg",
        &places("src/cli", &[], &["crate::pg", "workpump::pg", "workpump_actors"]),
    );
}

#[test]
fn sql_has_an_address() {
    none("SQL stands in migrations/ and src/pg/statement/ only", &places("src", &["src/pg/statement"], &SQL));
}

#[test]
fn only_the_claim_actor_claims_and_only_the_heartbeat_actor_beats() {
    none(
        "a claim of anybody else would lease rows that nobody runs",
        &places(
            "actors/src",
            &["actor/claim.rs", "actor/claim/", "testing"],
            &["store.claim(", ".claim(ClaimRequest"],
        ),
    );
    none(
        "a beat of anybody else would vouch for an actor that is gone",
        &places("actors/src", &["actor/heartbeat.rs", "testing"], &[".beat(", ".deregister("]),
    );
}

#[test]
fn only_the_sweeping_actor_writes_the_rows_of_others() {
    none(
        "a verdict of anybody else would be spoken without its grace, and a release without its breath",
        &places(
            "actors/src",
            &["actor/stale_sweep", "testing"],
            &[".evict_suspect(", ".release_pass(", ".sweep(", ".watch("],
        ),
    );
}

#[test]
fn capacity_comes_back_by_itself() {
    none(
        "dispatch and settle never tell the claim actor about capacity: a permit returns when a slot drops",
        &places("actors/src/actor", &["claim"], &["Semaphore", "add_permits", "ClaimActor"]),
    );
}

#[test]
fn production_does_not_know_the_test_kit_and_real_sockets_meet_no_paused_clock() {
    none(
        "production code must not use the test kit",
        &places("actors/src", &["actors/src/testing", "actors/src/lib.rs"], &["crate::testing"]),
    );
    none(
        "a paused clock fires timeouts on real sockets",
        &places("tests", &["architecture.rs"], &["start_paused", "tokio::time::pause"]),
    );
}

#[test]
fn every_room_says_its_rule_first() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "actors/src"] {
        for source in sources(folder) {
            let text = std::fs::read_to_string(root.join(&source.path)).expect("a readable source");
            assert!(text.starts_with("//!"), "{} does not open with its rule", source.path);
        }
    }
}

#[test]
fn no_file_is_longer_than_one_can_hold_in_mind() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "actors/src"] {
        for source in sources(folder) {
            let lines =
                std::fs::read_to_string(root.join(&source.path)).expect("a readable source").lines().count();
            assert!(lines <= 450, "{} has {lines} lines: find the second concern in it", source.path);
        }
    }
}
