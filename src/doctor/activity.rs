//! What goes on in the database: who keeps dead rows from being removed, how full the notification queue is, and what autovacuum leaves.
//!
//! The failure this finds: one forgotten transaction, anywhere, after which every claim reads more dead rows than the one before.

use tokio_postgres::types::Type;

use super::ask::{NoAnswer, Patient, value};
use super::finding::{Check, Finding, Group};
use crate::age::age;
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::doctor as sql;
use crate::pg::statement::doctor::advice;

const HORIZON: Check = Check(Group::Activity, "activity.horizon");
const QUEUE: Check = Check(Group::Activity, "activity.notification_queue");
const DEAD_ROWS: Check = Check(Group::Activity, "activity.dead_rows");
const AUTOVACUUM: Check = Check(Group::Activity, "activity.autovacuum");

/// A horizon held for longer is a warning: claims become slower by then.
const HELD_SECONDS: f64 = 60.0;
/// The same in transactions: one finished row leaves one dead row at least.
const HELD_TRANSACTIONS: i64 = 100_000;
/// Dead rows worth talking of, if they are also more than the live ones.
const DEAD: i64 = 100_000;
/// The tables that rows go through.
const BUSY: [&str; 7] = [
    "wh_outbox",
    "wh_inbox",
    "wh_perspective_events",
    "wh_receptor_processing",
    "wh_active_streams",
    "wh_service_instances",
    "wh_message_deduplication",
];

/// Somebody who holds the horizon back.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Holder {
    /// `session`, `prepared transaction` or `replication slot`.
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) described: String,
    pub(super) transactions: Option<i64>,
    pub(super) seconds: Option<f64>,
}

/// Who holds the horizon back, the oldest first, and whether everybody could be seen.
#[derive(Debug, Clone)]
pub(super) struct Horizon {
    pub(super) holders: Vec<Holder>,
    pub(super) sees_all: bool,
}

impl Horizon {
    pub(super) async fn ask(patient: &Patient) -> Result<Self, NoAnswer> {
        let sees_all = value(&patient.row(sql::SEES_ALL, &[]).await?, 0)?;
        let holder = |row: &_| {
            let (kind, name, described) = (value(row, 0)?, value(row, 1)?, value(row, 2)?);
            Ok(Holder { kind, name, described, transactions: value(row, 3)?, seconds: value(row, 4)? })
        };
        let holders = patient.rows(sql::HORIZON, &[]).await?.iter().map(holder).collect::<Result<_, _>>()?;
        Ok(Self { holders, sees_all })
    }
}

/// What that means.
pub(super) fn judge_horizon(asked: &Result<Horizon, NoAnswer>) -> Vec<Finding> {
    let horizon = match asked {
        Ok(horizon) => horizon,
        Err(reason) => return vec![HORIZON.not_made(reason)],
    };
    let long = |holder: &&Holder| {
        holder.seconds.is_some_and(|seconds| seconds >= HELD_SECONDS)
            || holder.transactions.is_some_and(|transactions| transactions >= HELD_TRANSACTIONS)
    };
    let mut findings: Vec<Finding> = horizon.holders.iter().filter(long).map(held).collect();
    if findings.is_empty() {
        findings.push(HORIZON.ok(match horizon.holders.first() {
            Some(oldest) => format!("nobody holds old rows for long; the oldest is {}", said(oldest)),
            None => "nobody holds old rows".to_owned(),
        }));
    }
    if !horizon.sees_all {
        findings.push(
            HORIZON
                .note(
                    "sessions of other roles are hidden from this one",
                    "one of them may hold old rows unseen",
                )
                .next("GRANT pg_read_all_stats to this role, or run the doctor as an administrator"),
        );
    }
    findings
}

fn held(holder: &Holder) -> Finding {
    let next = match holder.kind.as_str() {
        "prepared transaction" => advice::end_prepared(&holder.name),
        "replication slot" => format!(
            "let its reader catch up, switch its hot_standby_feedback off, or {}",
            advice::drop_slot(&holder.name)
        ),
        _ => format!(
            "end its transaction: {}, and find out why it stays open",
            advice::terminate(&holder.name)
        ),
    };
    let why = "finished rows cannot be removed while it lasts, so every claim reads more of them than the one before";
    HORIZON
        .warning(format!("{} keeps old rows from being removed", said(holder)), why)
        .about(format!("{} {}", holder.kind, holder.name))
        .next(next)
}

fn said(holder: &Holder) -> String {
    let since = holder.seconds.map(|seconds| format!(", for {}", age(seconds))).unwrap_or_default();
    let transactions = holder.transactions.map(|n| format!(", {n} transactions")).unwrap_or_default();
    format!("{} {} ({}{since}{transactions})", holder.kind, holder.name, holder.described)
}

/// The notification queue, one for the whole server.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    /// 0 to 1.
    pub(super) usage: f64,
    /// The oldest open transaction, described, and its age in seconds.
    pub(super) oldest: Option<(String, f64)>,
}

impl Queue {
    pub(super) async fn ask(patient: &Patient) -> Result<Self, NoAnswer> {
        let row = patient.row(sql::QUEUE, &[]).await?;
        let (described, seconds): (Option<String>, Option<f64>) = (value(&row, 1)?, value(&row, 2)?);
        Ok(Self { usage: value(&row, 0)?, oldest: described.zip(seconds) })
    }
}

/// What that means.
pub(super) fn judge_queue(asked: &Result<Queue, NoAnswer>) -> Finding {
    let queue = match asked {
        Ok(queue) => queue,
        Err(reason) => return QUEUE.not_made(reason),
    };
    let oldest = queue.oldest.as_ref().map_or_else(
        || "no transaction is open".to_owned(),
        |(who, seconds)| format!("the oldest open transaction is that of {who}, for {}", age(*seconds)),
    );
    let seen = format!("the notification queue is {:.1} % full; {oldest}", queue.usage * 100.0);
    let why = "it is emptied up to the slowest listener; one that stays in a transaction holds everything back, and when it is full every \
         commit that notifies fails, which includes storing work";
    let next = format!(
        "end the transaction of the session that listens and does not read: {}",
        advice::terminate("its pid")
    );
    if queue.usage >= 0.5 {
        QUEUE.error(seen, why).next(next)
    } else if queue.usage >= 0.1 {
        QUEUE.note(seen, why).next(next)
    } else {
        QUEUE.ok(seen)
    }
}

/// What autovacuum does for one table.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) live: i64,
    pub(super) dead: i64,
    pub(super) autovacuum_off: bool,
}

impl Table {
    pub(super) async fn ask(patient: &Patient, schema: &SchemaName) -> Result<Vec<Self>, NoAnswer> {
        let params = [(&schema.as_str() as _, Type::TEXT), (&BUSY.as_slice() as _, Type::TEXT_ARRAY)];
        let rows = patient.rows(sql::TABLES, &params).await?;
        let table = |row: &_| {
            let (name, live, dead) = (value(row, 0)?, value(row, 1)?, value(row, 2)?);
            Ok(Self { name, live, dead, autovacuum_off: value(row, 3)? })
        };
        rows.iter().map(table).collect()
    }
}

/// What that means.
pub(super) fn judge_tables(schema: &SchemaName, asked: &Result<Vec<Table>, NoAnswer>) -> Vec<Finding> {
    let tables = match asked {
        Ok(tables) => tables,
        Err(reason) => return vec![DEAD_ROWS.not_made(reason)],
    };
    let mut findings = Vec::new();
    for table in tables {
        let name = format!("{}.{}", schema.identifier(), table.name);
        if table.autovacuum_off {
            let why = "rows come and go all the time: without it the table and its indexes grow without end";
            findings.push(
                AUTOVACUUM
                    .warning(format!("autovacuum is switched off for {}", table.name), why)
                    .about(&table.name)
                    .next(format!("ALTER TABLE {name} RESET (autovacuum_enabled); VACUUM (ANALYZE) {name}")),
            );
        }
        if table.dead >= DEAD && table.dead > table.live {
            let seen = format!("{} has {} dead rows and {} live ones", table.name, table.dead, table.live);
            findings.push(
                DEAD_ROWS
                    .warning(seen, "claims read dead index entries before live ones")
                    .about(&table.name)
                    .next(format!("see activity.horizon; then VACUUM (ANALYZE) {name}, and let autovacuum run more often")),
            );
        }
    }
    if findings.is_empty() {
        let dead: i64 = tables.iter().map(|table| table.dead).sum();
        findings.push(DEAD_ROWS.ok(format!("{dead} dead rows wait for autovacuum")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity::{Error, Note, Ok as Well, Warning};
    use super::*;

    fn holder(kind: &str, transactions: i64, seconds: Option<f64>) -> Holder {
        let (kind, name, described) = (kind.to_owned(), "n'1".to_owned(), "user u".to_owned());
        Holder { kind, name, described, transactions: Some(transactions), seconds }
    }

    fn horizon(holders: Vec<Holder>) -> Vec<Finding> {
        judge_horizon(&Ok(Horizon { holders, sees_all: true }))
    }

    #[test]
    fn a_horizon_is_held_for_too_long_by_time_or_by_transactions() {
        for (holder, severity) in [
            (holder("session", 99_999, Some(59.9)), Well),
            (holder("session", 3, Some(60.0)), Warning),
            (holder("session", 100_000, Some(1.0)), Warning),
            (holder("replication slot", 100_000, None), Warning),
            (holder("replication slot", 10, None), Well),
            (holder("prepared transaction", 1, Some(3_600.0)), Warning),
        ] {
            let findings = horizon(vec![holder]);
            assert_eq!(findings.iter().map(|f| f.severity).collect::<Vec<_>>(), [severity], "{findings:?}");
        }
        let step = horizon(vec![holder("prepared transaction", 1, Some(100.0))]).remove(0).next_step;
        assert_eq!(step.as_deref(), Some("COMMIT PREPARED or ROLLBACK PREPARED 'n''1'"));
    }

    #[test]
    fn who_cannot_see_everybody_says_so() {
        let findings = judge_horizon(&Ok(Horizon { holders: Vec::new(), sees_all: false }));
        assert_eq!(findings.iter().map(|f| f.severity).collect::<Vec<_>>(), [Well, Note]);
    }

    #[test]
    fn the_queue_is_a_note_from_a_tenth_and_an_error_from_a_half() {
        let judge = |usage| judge_queue(&Ok(Queue { usage, oldest: Some(("process 7".to_owned(), 90.0)) }));
        let severities = [0.0, 0.099, 0.1, 0.49, 0.5, 1.0].map(|usage| judge(usage).severity);
        assert_eq!(severities, [Well, Well, Note, Note, Error, Error]);
        let seen = judge(0.75).seen;
        assert_eq!(
            seen,
            "the notification queue is 75.0 % full; the oldest open transaction is that of process 7, for 90.0 s"
        );
    }

    #[test]
    fn dead_rows_count_when_there_are_many_and_more_than_live_ones() {
        let judge = |live, dead, autovacuum_off| {
            let table = Table { name: "wh_outbox".to_owned(), live, dead, autovacuum_off };
            let schema = SchemaName::new("public").unwrap();
            judge_tables(&schema, &Ok(vec![table])).into_iter().map(|f| f.severity).collect::<Vec<_>>()
        };
        assert_eq!(judge(0, 99_999, false), [Well]);
        assert_eq!(judge(1_000_000, 500_000, false), [Well]);
        assert_eq!(judge(0, 100_000, false), [Warning]);
        assert_eq!(judge(0, 100_000, true), [Warning, Warning]);
    }
}
