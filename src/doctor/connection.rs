//! Who answers at the two addresses.
//!
//! The rule: a session counts as direct when it proves it (`pg/direct.rs`); everything else is somebody in between. Whether two sessions
//! lead to the same database is asked of the server, never guessed from the addresses.

use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::{Client, Config};

use super::ask::{NoAnswer, Patient, value};
use super::finding::{Check, Finding, Group};
use crate::pg::place::Place;
use crate::pg::session::Session;
use crate::pg::statement::doctor as sql;

const DATABASE: Check = Check(Group::Connections, "connections.database");
const DIRECT: Check = Check(Group::Connections, "connections.direct");
const POOLING: Check = Check(Group::Connections, "connections.pooling");
const VERSION: Check = Check(Group::Connections, "connections.server_version");
const STANDBY: Check = Check(Group::Connections, "connections.standby");
const SAME: Check = Check(Group::Connections, "connections.same_database");

/// The servers this library is tested with.
const SERVERS: std::ops::RangeInclusive<i32> = 15..=18;
/// How long the look at a pooler may take.
const PROBE: Duration = Duration::from_secs(3);
const GIVE_DIRECT: &str = "set WORKPUMP_DIRECT_URL (`--direct-url`, in code `.direct_url(…)`) to an address of the PostgreSQL server itself, \
     past the pooler";

/// How a pooler shares its server connections out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pooling {
    /// One for each transaction.
    Transaction,
    /// One for each statement: no transactions at all.
    Statement,
    /// Two sessions kept theirs for as long as we looked.
    Session,
    /// It could not be told.
    Unknown,
}

/// What opening the sessions came to; the reason of a pooled one is how it was found out.
pub(super) struct Opened<'a> {
    pub(super) database: Result<Option<&'a str>, &'a NoAnswer>,
    pub(super) pooling: Pooling,
    /// None: no direct address was given.
    pub(super) direct: Option<Result<Option<&'a str>, &'a NoAnswer>>,
}

/// Finds out how the pooler at this address works, with a second session beside the first.
pub(super) async fn pooling(first: &Patient, config: &Config) -> Pooling {
    let probe = async {
        let second = Session::open_with(config, PROBE).await.ok()?;
        watch_backends(first.client(), &second.client).await
    };
    timeout(first.at_most(PROBE), probe).await.ok().flatten().unwrap_or(Pooling::Unknown)
}

/// One backend that serves both sessions is shared between them, and so is one that changes under a session.
async fn watch_backends(first: &Client, second: &Client) -> Option<Pooling> {
    let mut served = None;
    for _ in 0..5 {
        let one = backend(first).await?;
        if one == backend(second).await? || served.is_some_and(|before| before != one) {
            return Some(transactions(second).await);
        }
        served = Some(one);
    }
    Some(Pooling::Session)
}

async fn backend(client: &Client) -> Option<i32> {
    client.query_typed_one(sql::BACKEND, &[]).await.ok()?.try_get(0).ok()
}

/// Whether transactions are allowed.
async fn transactions(client: &Client) -> Pooling {
    let begun = client.batch_execute(sql::BEGIN).await;
    // The session is dropped in any case.
    let _ = client.batch_execute(sql::END).await;
    if begun.is_ok() { Pooling::Transaction } else { Pooling::Statement }
}

/// What that means.
pub(super) fn judge(opened: &Opened<'_>) -> Vec<Finding> {
    let mut findings = vec![judge_database(opened)];
    if let Ok(Some(how)) = opened.database {
        findings.push(judge_pooling(opened.pooling, how, opened.direct.is_some()));
    }
    if let Some(direct) = opened.direct {
        findings.push(match direct {
            Err(reason) => DIRECT
                .error(
                    format!("cannot connect by the direct URL: {reason}"),
                    "without a direct session there is no alive-lock and nothing hears a notification",
                )
                .next("correct WORKPUMP_DIRECT_URL, or the server's access rules and firewall for it"),
            Ok(Some(how)) => DIRECT
                .error(
                    format!("the direct URL leads to a pooler ({how})"),
                    "alive-lock and LISTEN need a session that stays with its server process; through a pooler neither works",
                )
                .next(GIVE_DIRECT),
            Ok(None) => DIRECT.ok("the direct URL leads to the server itself"),
        });
    }
    findings
}

fn judge_database(opened: &Opened<'_>) -> Finding {
    match opened.database {
        Err(reason) => DATABASE
            .error(format!("cannot connect by the database URL: {reason}"), "nothing works without it")
            .next("correct WORKPUMP_DATABASE_URL, start the server, or open its access rules (pg_hba.conf) and firewall"),
        Ok(None) => DATABASE.ok("the database URL leads to the server itself"),
        Ok(Some(_)) => DATABASE.ok("the database URL is answered, by a pooler"),
    }
}

fn judge_pooling(pooling: Pooling, how: &str, has_direct: bool) -> Finding {
    let mode = match pooling {
        Pooling::Statement => {
            return POOLING
                .error(
                    "the pooler shares its connections out for each statement",
                    "it refuses transactions, and messages are stored in transactions",
                )
                .next("set pool_mode = transaction in the pooler");
        }
        Pooling::Transaction => "in transaction mode",
        Pooling::Session => "in session mode, as it seems",
        Pooling::Unknown => "in a mode that could not be told",
    };
    let seen = format!("the database URL goes through a pooler {mode} ({how})");
    if has_direct {
        return POOLING.ok(seen);
    }
    POOLING
        .warning(
            format!("{seen}, and there is no direct URL"),
            "there is no alive-lock and no listening: a dead instance is noticed after 65 s instead of 5, and new work waits for the next poll",
        )
        .next(GIVE_DIRECT)
}

/// Which database of which server is at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) place: Place,
    pub(super) version: i32,
    pub(super) version_text: String,
    pub(super) role: String,
    /// Reached through a Unix socket.
    pub(super) local: bool,
}

impl Identity {
    pub(super) async fn ask(patient: &Patient) -> Result<Self, NoAnswer> {
        let row = patient.row(sql::IDENTITY, &[]).await?;
        let system = patient.row(sql::SYSTEM, &[]).await.and_then(|row| value(&row, 0)).ok();
        let place = Place {
            database: value(&row, 0)?,
            database_id: value(&row, 1)?,
            standby: value(&row, 2)?,
            started: value(&row, 3)?,
            system,
        };
        Ok(Self {
            place,
            version: value(&row, 4)?,
            version_text: value(&row, 5)?,
            role: value(&row, 6)?,
            local: value(&row, 7)?,
        })
    }
}

/// What the database is like, and whether the direct session is in the same one.
pub(super) fn judge_identity(
    database: &Result<Identity, NoAnswer>,
    direct: Option<&Result<Identity, NoAnswer>>,
) -> Vec<Finding> {
    let database = match database {
        Ok(database) => database,
        Err(reason) => return vec![VERSION.not_made(reason)],
    };
    let mut findings = vec![judge_version(database)];
    if database.place.standby {
        let seen = format!("database {:?} is on a standby", database.place.database);
        findings.push(
            STANDBY
                .error(seen, "a standby can be read only: nothing can be stored, claimed or settled")
                .next("point the database URL at the primary"),
        );
    }
    match direct {
        Some(Ok(direct)) => findings.push(judge_same(database, direct)),
        Some(Err(reason)) => findings.push(SAME.not_made(reason)),
        None => {}
    }
    findings
}

fn judge_version(database: &Identity) -> Finding {
    let seen = format!("PostgreSQL {}", database.version_text);
    let major = database.version / 10_000;
    if SERVERS.contains(&major) {
        VERSION.ok(seen)
    } else if major < *SERVERS.start() {
        VERSION
            .error(seen, "this library needs PostgreSQL 15 or newer")
            .next("upgrade the server to one of 15 to 18")
    } else {
        VERSION
            .warning(seen, "this library was tested with PostgreSQL 15 to 18 only")
            .next("look for a newer version of this library")
    }
}

fn judge_same(database: &Identity, direct: &Identity) -> Finding {
    let split = "instances would hold their alive-locks and listen where nobody looks and nobody rings: they are taken for dead, or \
         wait for the next poll";
    match database.place.instead(&direct.place) {
        Some(wrong) => SAME
            .error(format!("the direct URL leads to {wrong}"), split)
            .next("let both URLs lead to the same database of the same primary"),
        None => SAME.ok(format!("both sessions are in database {:?}", database.place.database)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity::{self, Error, Ok as Well, Warning};
    use super::*;

    fn identity() -> Identity {
        Identity {
            place: Place {
                database: "shop".to_owned(),
                database_id: "5".to_owned(),
                standby: false,
                started: 1,
                system: Some("7".to_owned()),
            },
            version: 180_001,
            version_text: "18.1".to_owned(),
            role: "app".to_owned(),
            local: false,
        }
    }

    fn same(change: impl FnOnce(&mut Place)) -> Finding {
        let mut direct = identity();
        change(&mut direct.place);
        judge_same(&identity(), &direct)
    }

    #[test]
    fn every_way_to_lead_elsewhere_is_told_apart() {
        assert_eq!(same(|_| {}).severity, Severity::Ok);
        assert_eq!(same(|direct| direct.system = None).severity, Severity::Ok, "not everybody may see it");
        for (change, said) in [
            (
                &(|direct: &mut Place| direct.system = Some("8".to_owned())) as &dyn Fn(&mut Place),
                "another server",
            ),
            (&|direct| direct.started = 2, "another server"),
            (&|direct| (direct.started, direct.standby) = (2, true), "a standby of"),
            (
                &|direct| (direct.database_id, direct.database) = ("6".to_owned(), "bank".to_owned()),
                "database \"bank\"",
            ),
        ] {
            let finding = same(change);
            assert_eq!(finding.severity, Severity::Error);
            assert!(finding.seen.contains(said), "{}", finding.seen);
        }
    }

    #[test]
    fn servers_outside_of_15_to_18_are_not_well() {
        let judge = |version| judge_version(&Identity { version, ..identity() }).severity;
        assert_eq!(
            [140_009, 150_000, 180_003, 190_000].map(judge),
            [Severity::Error, Severity::Ok, Severity::Ok, Severity::Warning]
        );
    }

    #[test]
    fn a_pooler_is_well_when_there_is_a_way_past_it() {
        let judge = |pooling, direct| {
            let opened = Opened { database: Ok(Some("refused")), pooling, direct };
            judge(&opened).into_iter().map(|finding| finding.severity).collect::<Vec<_>>()
        };
        assert_eq!(judge(Pooling::Transaction, None), [Well, Warning]);
        assert_eq!(judge(Pooling::Transaction, Some(Ok(None))), [Well, Well, Well]);
        assert_eq!(judge(Pooling::Session, Some(Ok(Some("refused")))), [Well, Well, Error]);
        assert_eq!(judge(Pooling::Statement, Some(Ok(None))), [Well, Error, Well]);
        assert_eq!(judge(Pooling::Unknown, Some(Err(&NoAnswer::new("no")))), [Well, Well, Error]);
    }
}
