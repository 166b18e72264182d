//! The server: its clock, its settings for this role, its room for sessions, and how it notices a client that is gone.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio_postgres::types::Type;

use super::ask::{NoAnswer, Patient, value};
use super::finding::{Check, Finding, Group};
use crate::pg::limits::SERVER_LIMITS;
use crate::pg::session::STATEMENT_TIMEOUT;
use crate::pg::statement::doctor as sql;
use crate::pg::statement::doctor::advice;

const CLOCK: Check = Check(Group::Server, "server.clock");
const SETTINGS: Check = Check(Group::Server, "server.settings");
const ROOM: Check = Check(Group::Server, "server.sessions");
const LOCKS: Check = Check(Group::Server, "server.locks");
const KEEPALIVE: Check = Check(Group::Server, "server.keepalives");

/// Sessions of one instance: five of its own and a pool of two.
pub(super) const SESSIONS_OF_AN_INSTANCE: i64 = 7;
/// Claims hold at most this many advisory locks together: 1 024 buckets for each of four categories.
const LOCKS_OF_CLAIMS: i64 = 4_096;
/// Settings that are read.
const READ: [&str; 15] = [
    "default_transaction_isolation",
    "default_transaction_read_only",
    "session_replication_role",
    "synchronous_commit",
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
    "autovacuum",
    "max_connections",
    "superuser_reserved_connections",
    "reserved_connections",
    "max_locks_per_transaction",
    "max_prepared_transactions",
];

/// Settings by name; what the server does not know is absent.
pub(super) type Settings = BTreeMap<String, String>;

/// The settings with which this role's sessions start.
pub(super) async fn settings(patient: &Patient) -> Result<Settings, NoAnswer> {
    let rows = patient.rows(sql::SETTINGS, &[(&READ.as_slice(), Type::TEXT_ARRAY)]).await?;
    rows.iter().map(|row| Ok((value(row, 0)?, value(row, 1)?))).collect()
}

fn number(settings: &Settings, name: &str) -> i64 {
    settings.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// What the settings mean for the pump.
pub(super) fn judge_settings(asked: &Result<Settings, NoAnswer>) -> Vec<Finding> {
    let settings = match asked {
        Ok(settings) => settings,
        Err(reason) => return vec![SETTINGS.not_made(reason)],
    };
    let is = |name: &str, wanted: &str| settings.get(name).is_none_or(|value| value == wanted);
    let mut findings: Vec<Finding> = [
        (
            "default_transaction_isolation",
            "read committed",
            "claims and sweeps need a new snapshot for each statement, and are refused",
        ),
        ("default_transaction_read_only", "off", "nothing can be stored, claimed or settled"),
        ("session_replication_role", "origin", "triggers do not run: nobody is rung when work arrives"),
    ]
    .into_iter()
    .filter(|(name, wanted, _)| !is(name, wanted))
    .map(|(name, wanted, why)| set_to(settings, name, why, Finding::is_error).next(reset(name, wanted)))
    .collect();
    if !is("autovacuum", "on") {
        let why = "rows come and go all the time: without it tables and indexes grow without end";
        findings.push(
            set_to(settings, "autovacuum", why, Finding::is_warning).next("ALTER SYSTEM SET autovacuum = on"),
        );
    }
    if is("synchronous_commit", "off") && settings.contains_key("synchronous_commit") {
        let why =
            "a crash of the server can lose the last acknowledged messages and settlements (these run again)";
        findings.push(
            set_to(settings, "synchronous_commit", why, |_| {}).next(reset("synchronous_commit", "on")),
        );
    }
    findings.extend(judge_timeouts(settings));
    if findings.is_empty() {
        findings.push(SETTINGS.ok("no setting of this role or database stands in the way"));
    }
    findings.push(judge_locks(settings));
    findings
}

/// A finding about one setting; `weigh` makes more of it than a note.
fn set_to(settings: &Settings, name: &str, why: &str, weigh: impl FnOnce(&mut Finding)) -> Finding {
    let value = settings.get(name).map_or("", String::as_str);
    let mut finding = SETTINGS.note(format!("{name} = {value}"), why).about(name);
    weigh(&mut finding);
    finding
}

fn reset(name: &str, wanted: &str) -> String {
    let roles = advice::ROLE_SETTINGS;
    format!(
        "find where it is set (`{roles}`, the URL's options, the pooler), and there: SET {name} = '{wanted}'"
    )
}

/// Time limits that end what the pump has to do. The pump sets its own limit for statements where there is no pooler.
fn judge_timeouts(settings: &Settings) -> Vec<Finding> {
    let needed = STATEMENT_TIMEOUT.as_millis() as i64;
    [
        (
            "statement_timeout",
            needed,
            "long claims and settlements are cut off, and their rows wait for the end of their leases",
        ),
        ("transaction_timeout", needed, "long claims, settlements and the death watch are cut off"),
        ("lock_timeout", 1_000, "beats and settlements that have to wait for a moment fail instead"),
        (
            "idle_in_transaction_session_timeout",
            5_000,
            "transactions of handlers that think for longer are cut off",
        ),
        (
            "idle_session_timeout",
            60_000,
            "sessions that are idle between beats and claims are cut off and opened anew all the time",
        ),
    ]
    .into_iter()
    .filter(|(name, least, _)| (1..*least).contains(&number(settings, name)))
    // The doctor's own direct session has the doctor's own limit.
    .filter(|(name, _, _)| *name != "statement_timeout" || number(settings, name) != OWN_STATEMENT_TIMEOUT)
    .map(|(name, least, why)| {
        let mut finding = set_to(settings, name, why, Finding::is_warning);
        finding.seen.push_str(" ms");
        finding.next(format!("ALTER ROLE … SET {name} to 0 (none), or to {least} ms at least"))
    })
    .collect()
}

/// What the doctor's direct sessions start with.
const OWN_STATEMENT_TIMEOUT: i64 = 3_000;

fn judge_locks(settings: &Settings) -> Finding {
    let slots = number(settings, "max_locks_per_transaction")
        * (number(settings, "max_connections") + number(settings, "max_prepared_transactions"));
    let seen = format!("the lock table has room for {slots} locks");
    if slots >= LOCKS_OF_CLAIMS {
        return LOCKS.ok(seen);
    }
    LOCKS
        .warning(seen, format!("claims take up to {LOCKS_OF_CLAIMS} advisory locks together; with a full table every session fails"))
        .next("ALTER SYSTEM SET max_locks_per_transaction = 128, then restart the server")
}

/// Who is there, and who may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sessions {
    pub(super) all: i64,
    pub(super) database: i64,
    pub(super) role: i64,
    /// Negative: no limit.
    pub(super) database_limit: i64,
    /// Negative: no limit.
    pub(super) role_limit: i64,
}

impl Sessions {
    pub(super) async fn ask(patient: &Patient) -> Result<Self, NoAnswer> {
        let row = patient.row(sql::SESSIONS, &[]).await?;
        let (all, database, role) = (value(&row, 0)?, value(&row, 1)?, value(&row, 2)?);
        Ok(Self { all, database, role, database_limit: value(&row, 3)?, role_limit: value(&row, 4)? })
    }
}

/// Whether one more instance could start.
pub(super) fn judge_room(settings: &Settings, asked: &Result<Sessions, NoAnswer>) -> Finding {
    let sessions = match asked {
        Ok(sessions) => sessions,
        Err(reason) => return ROOM.not_made(reason),
    };
    let reserved =
        number(settings, "superuser_reserved_connections") + number(settings, "reserved_connections");
    let places = [
        ("max_connections of the server", number(settings, "max_connections") - reserved, sessions.all),
        ("CONNECTION LIMIT of the database", sessions.database_limit, sessions.database),
        ("CONNECTION LIMIT of the role", sessions.role_limit, sessions.role),
    ];
    let limited = places.into_iter().filter(|(_, limit, _)| *limit > 0);
    let Some((what, limit, used)) = limited.min_by_key(|(_, limit, used)| limit - used) else {
        return ROOM.not_made("the server did not say how many sessions it takes");
    };
    let free = (limit - used).max(0);
    let seen = format!("{free} of {limit} sessions are free ({what})");
    if free >= SESSIONS_OF_AN_INSTANCE {
        return ROOM.ok(seen);
    }
    let why = format!(
        "an instance needs {SESSIONS_OF_AN_INSTANCE} sessions (five of its own, a pool of two): no further one can start"
    );
    ROOM.warning(seen, why).next(format!("raise {what}, or let clients use fewer sessions or a pooler"))
}

/// How far the server's clock is ahead of ours, and how well that is known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Skew {
    pub(super) seconds: f64,
    pub(super) uncertainty: f64,
}

/// Asks three times; the quickest answer is the best.
pub(super) async fn skew(patient: &Patient) -> Result<Skew, NoAnswer> {
    let mut best: Option<Skew> = None;
    for _ in 0..3 {
        let before = wall_clock();
        let asked = patient.client().query_typed_one(sql::CLOCK, &[]);
        let row = patient.within(Duration::from_secs(3), asked).await?;
        let after = wall_clock();
        let server = value::<i64>(&row, 0)? as f64 / 1e6;
        let answer = Skew {
            seconds: server - f64::midpoint(before, after),
            uncertainty: (after - before).abs() / 2.0,
        };
        best = best.filter(|best| best.uncertainty <= answer.uncertainty).or(Some(answer));
    }
    best.ok_or_else(|| NoAnswer::new("the clock was not asked"))
}

/// This host's clock, in seconds since 1970. It decides nothing: it is what is examined.
#[expect(clippy::disallowed_methods, reason = "the wall clock itself is what is compared")]
fn wall_clock() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// What a difference of the clocks means.
pub(super) fn judge_clock(asked: &Result<Skew, NoAnswer>) -> Finding {
    let skew = match asked {
        Ok(skew) => skew,
        Err(reason) => return CLOCK.not_made(reason),
    };
    let certain = skew.seconds.abs() - skew.uncertainty;
    let side = if skew.seconds < 0.0 { "behind" } else { "ahead of" };
    let seen = format!(
        "the server's clock is {:.2} s {side} this host's (± {:.2} s)",
        skew.seconds.abs(),
        skew.uncertainty
    );
    let why = "leases, schedules and deaths go by the server's clock alone, so nothing of the pump breaks; times in logs do not match, and \
         schedules computed here are off by as much";
    let step = "let both hosts keep their time by NTP (chronyc tracking, timedatectl)";
    if certain > 5.0 {
        CLOCK.warning(seen, why).next(step)
    } else if certain > 1.0 {
        CLOCK.note(seen, why).next(step)
    } else {
        CLOCK.ok(seen)
    }
}

/// The limits that the server really applies to the direct session.
pub(super) async fn keepalives(direct: &Patient) -> Result<Settings, NoAnswer> {
    let names = SERVER_LIMITS.map(|(name, _)| name);
    let rows = direct.rows(sql::IN_FORCE, &[(&names.as_slice(), Type::TEXT_ARRAY)]).await?;
    let shown =
        rows.iter().map(|row| Ok((value(row, 0)?, value::<Option<String>>(row, 1)?.unwrap_or_default())));
    shown.collect()
}

/// Whether a lost host is noticed in time. `local`: through a Unix socket there is no network to lose.
pub(super) fn judge_keepalives(asked: &Result<Settings, NoAnswer>, local: bool) -> Finding {
    let settings = match asked {
        Ok(settings) => settings,
        Err(reason) => return KEEPALIVE.not_made(reason),
    };
    if local {
        return KEEPALIVE.ok("the direct session runs over a Unix socket: no network can be lost");
    }
    let shown: Vec<String> = SERVER_LIMITS
        .iter()
        .map(|(name, _)| format!("{name} {}", settings.get(*name).map_or("unknown", String::as_str)))
        .collect();
    let wrong: Vec<&str> = SERVER_LIMITS
        .iter()
        .filter(|(name, wanted)| settings.get(*name).is_none_or(|value| value != wanted))
        .map(|(name, _)| *name)
        .collect();
    let seen = shown.join(", ");
    if wrong.is_empty() {
        return KEEPALIVE.ok(seen);
    }
    KEEPALIVE
        .warning(
            format!("the server does not keep {}: {seen}", wrong.join(", ")),
            "when a host is lost its alive-lock stays held until the operating system gives the connection up, by default after two hours",
        )
        .next("set them in postgresql.conf, or the host's net.ipv4.tcp_keepalive_time, _intvl and _probes, and tcp_retries2")
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity::{Error, Note, Ok as Well, Warning};
    use super::*;

    fn healthy() -> Settings {
        [
            ("default_transaction_isolation", "read committed"),
            ("default_transaction_read_only", "off"),
            ("session_replication_role", "origin"),
            ("synchronous_commit", "on"),
            ("statement_timeout", "0"),
            ("lock_timeout", "0"),
            ("autovacuum", "on"),
            ("max_connections", "100"),
            ("superuser_reserved_connections", "3"),
            ("max_locks_per_transaction", "64"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    fn with(name: &str, value: &str) -> Settings {
        let mut settings = healthy();
        settings.insert(name.to_owned(), value.to_owned());
        settings
    }

    #[test]
    fn each_setting_that_stands_in_the_way_is_named_with_its_weight() {
        assert!(judge_settings(&Ok(healthy())).iter().all(|finding| finding.severity == Well));
        for (name, value, severity) in [
            ("default_transaction_isolation", "serializable", Error),
            ("default_transaction_read_only", "on", Error),
            ("session_replication_role", "replica", Error),
            ("autovacuum", "off", Warning),
            ("synchronous_commit", "off", Note),
            ("statement_timeout", "1000", Warning),
            ("lock_timeout", "10", Warning),
            ("idle_session_timeout", "1000", Warning),
            ("idle_in_transaction_session_timeout", "10", Warning),
            ("transaction_timeout", "10000", Warning),
        ] {
            let findings = judge_settings(&Ok(with(name, value)));
            assert_eq!(findings.len(), 2, "{name}");
            assert_eq!((findings[0].severity, findings[0].subject.as_deref()), (severity, Some(name)));
            assert!(findings[0].next_step.is_some() && findings[0].seen.contains(value), "{name}");
        }
    }

    #[test]
    fn limits_that_are_long_enough_are_fine() {
        for (name, value) in
            [("statement_timeout", "20000"), ("lock_timeout", "1000"), ("idle_session_timeout", "60000")]
        {
            assert!(
                judge_settings(&Ok(with(name, value))).iter().all(|finding| finding.severity == Well),
                "{name}"
            );
        }
    }

    #[test]
    fn a_small_lock_table_is_a_warning() {
        assert_eq!(judge_locks(&with("max_locks_per_transaction", "10")).severity, Warning);
        assert_eq!(judge_locks(&healthy()).severity, Well);
    }

    #[test]
    fn the_tightest_limit_for_sessions_decides() {
        let free = Sessions { all: 50, database: 10, role: 5, database_limit: -1, role_limit: -1 };
        let judge = |sessions| {
            let finding = judge_room(&healthy(), &Ok(sessions));
            (finding.severity, finding.seen)
        };
        assert_eq!(
            judge(free),
            (Well, "47 of 97 sessions are free (max_connections of the server)".to_owned())
        );
        assert_eq!(judge(Sessions { all: 90, ..free }).0, Well, "exactly one instance fits");
        assert_eq!(judge(Sessions { all: 91, ..free }).0, Warning);
        let tight = judge(Sessions { role_limit: 6, ..free });
        assert_eq!(tight, (Warning, "1 of 6 sessions are free (CONNECTION LIMIT of the role)".to_owned()));
        assert_eq!(judge(Sessions { database_limit: 11, ..free }).0, Warning);
    }

    #[test]
    fn clocks_are_judged_by_what_is_certain() {
        let judge = |seconds, uncertainty| judge_clock(&Ok(Skew { seconds, uncertainty })).severity;
        assert_eq!(
            [judge(0.9, 0.0), judge(-1.1, 0.0), judge(5.1, 0.0), judge(-60.0, 0.1)],
            [Well, Note, Warning, Warning]
        );
        assert_eq!([judge(5.5, 1.0), judge(2.0, 1.5)], [Note, Well], "a slow answer proves nothing");
        let seen = judge_clock(&Ok(Skew { seconds: -7.0, uncertainty: 0.0 })).seen;
        assert!(seen.contains("7.00 s behind"), "{seen}");
    }

    #[test]
    fn a_limit_that_the_server_does_not_keep_is_a_warning_on_a_network_only() {
        let kept: Settings = SERVER_LIMITS.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut lost = kept.clone();
        lost.insert("tcp_user_timeout".to_owned(), "0".to_owned());
        assert_eq!(judge_keepalives(&Ok(kept), false).severity, Well);
        assert_eq!(judge_keepalives(&Ok(lost.clone()), false).severity, Warning);
        assert_eq!(judge_keepalives(&Ok(lost), true).severity, Well);
        assert_eq!(judge_keepalives(&Ok(Settings::new()), false).severity, Warning);
    }
}
