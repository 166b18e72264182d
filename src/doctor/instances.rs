//! The members, and work that nobody gets on with.

use uuid::Uuid;

use super::ask::{NoAnswer, Patient, value};
use super::finding::{Check, Finding, Group, listed};
use crate::age::age;
use crate::pg::migrate::LIBRARY_VERSION;
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::doctor as sql;
use crate::pg::statement::doctor::advice;

const MEMBERS: Check = Check(Group::Instances, "instances.members");
const STALE: Check = Check(Group::Instances, "instances.stale");
const GATE: Check = Check(Group::Instances, "instances.gate");
const VERSIONS: Check = Check(Group::Instances, "instances.versions");
const RELEASE: Check = Check(Group::Instances, "instances.release");
const STUCK: Check = Check(Group::Instances, "instances.stuck_work");
const DEAD_LETTERS: Check = Check(Group::Instances, "instances.dead_letters");

/// A death is noticed and worked off within minutes: what is unreleased for longer is left lying.
const UNRELEASED_SECONDS: f64 = 120.0;
/// Where counting ends.
const MANY: i64 = 1_000;
const MANY_LETTERS: i64 = 100_000;

/// One member.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) id: Uuid,
    pub(super) service: String,
    pub(super) host: String,
    pub(super) process: i32,
    pub(super) beat_age: f64,
    pub(super) alive: bool,
    pub(super) gate: Option<String>,
    pub(super) gate_reason: Option<String>,
    pub(super) version: Option<String>,
    /// None: it did not say, and is taken to run all.
    pub(super) categories: Option<Vec<String>>,
}

impl Member {
    fn named(&self) -> String {
        let runs = match &self.categories {
            None => String::new(),
            Some(some) if some.is_empty() => ", runs nothing".to_owned(),
            Some(some) => format!(", runs {}", some.join(" and ")),
        };
        format!("{} ({} on {}, process {}{runs})", self.id, self.service, self.host, self.process)
    }

    fn runs(&self, category: &str) -> bool {
        self.categories.as_ref().is_none_or(|some| some.iter().any(|one| one == category))
    }
}

/// One category's work.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub(super) category: String,
    pub(super) unfinished: bool,
    /// Leased, and the lease ran out more than a minute ago.
    pub(super) expired: i64,
    /// Leased to nobody who is or was a member.
    pub(super) unowned: i64,
}

/// The members.
pub(super) async fn members(patient: &Patient, schema: &SchemaName) -> Result<Vec<Member>, NoAnswer> {
    let member = |row: &_| {
        Ok(Member {
            id: value(row, 0)?,
            service: value(row, 1)?,
            host: value(row, 2)?,
            process: value(row, 3)?,
            beat_age: value(row, 4)?,
            alive: value(row, 5)?,
            gate: value(row, 6)?,
            version: value(row, 7)?,
            gate_reason: value(row, 8)?,
            categories: value(row, 9)?,
        })
    };
    patient.rows(&sql::members(schema), &[]).await?.iter().map(member).collect()
}

/// Tombstones with something left to hand back, and the age of the oldest.
pub(super) async fn unreleased(patient: &Patient, schema: &SchemaName) -> Result<(i64, f64), NoAnswer> {
    let row = patient.row(&sql::unreleased(schema), &[]).await?;
    Ok((value(&row, 0)?, value(&row, 1)?))
}

/// The work of each category.
pub(super) async fn work(patient: &Patient, schema: &SchemaName) -> Result<Vec<Work>, NoAnswer> {
    let work = |row: &_| {
        let (category, unfinished) = (value(row, 0)?, value(row, 1)?);
        Ok(Work { category, unfinished, expired: value(row, 2)?, unowned: value(row, 3)? })
    };
    patient.rows(&sql::stuck(schema), &[]).await?.iter().map(work).collect()
}

/// Dead letters of each category.
pub(super) async fn dead_letters(
    patient: &Patient,
    schema: &SchemaName,
) -> Result<Vec<(String, i64)>, NoAnswer> {
    let rows = patient.rows(&sql::dead_letters(schema), &[]).await?;
    rows.iter().map(|row| Ok((value(row, 0)?, value(row, 1)?))).collect()
}

/// What the members are like.
pub(super) fn judge_members(schema: &SchemaName, asked: &Result<Vec<Member>, NoAnswer>) -> Vec<Finding> {
    let members = match asked {
        Ok(members) => members,
        Err(reason) => return vec![MEMBERS.not_made(reason)],
    };
    let alive = members.iter().filter(|member| member.alive).count();
    let mut findings = vec![MEMBERS.ok(format!("{alive} of {} members are alive", members.len()))];
    findings.extend(members.iter().filter(|member| !member.alive).map(|member| {
        let seen = format!("{} has not beaten for {}", member.named(), age(member.beat_age));
        STALE
            .warning(seen, "it counts as dead, and its rows wait until a living instance evicts it")
            .about(member.id.to_string())
            .next(format!(
                "start an instance: it evicts the dead within two minutes; or {}",
                advice::evict(schema, &format!("'{}'", member.id))
            ))
    }));
    let broken = |member: &&Member| member.alive && member.gate.as_deref() == Some("unavailable");
    findings.extend(members.iter().filter(broken).map(|member| {
        GATE.warning(
            match &member.gate_reason {
                Some(reason) => format!("{} hears no notifications: {reason}", member.named()),
                None => format!("{} hears no notifications", member.named()),
            },
            "it polls at its tight interval instead: more load on the database, later starts",
        )
        .about(member.id.to_string())
        .next("run the doctor with the addresses of that instance, from its host")
    }));
    let mut versions: Vec<String> = members.iter().filter_map(|member| member.version.clone()).collect();
    versions.sort();
    versions.dedup();
    if versions.iter().any(|version| version != LIBRARY_VERSION) {
        findings.push(
            VERSIONS
                .note(
                    format!("members run workpump {}, this is {LIBRARY_VERSION}", listed(&versions)),
                    "that is fine while an upgrade rolls out; the oldest decides what works",
                )
                .next("finish the upgrade"),
        );
    }
    findings
}

/// What is left of evicted instances.
pub(super) fn judge_release(asked: &Result<(i64, f64), NoAnswer>) -> Finding {
    match asked {
        Err(reason) => RELEASE.not_made(reason),
        Ok((0, _)) => RELEASE.ok("everything of evicted instances was handed back"),
        Ok((count, oldest)) => {
            let seen = format!("{count} evicted instances still hold rows, the oldest for {}", age(*oldest));
            if *oldest < UNRELEASED_SECONDS {
                return RELEASE.ok(seen);
            }
            RELEASE
                .warning(seen, "their rows wait for the end of their leases instead of being handed back")
                .next(format!(
                    "start an instance; if there is one, find who has their rows locked: {}",
                    advice::BLOCKERS
                ))
        }
    }
}

/// Work that nobody gets on with.
pub(super) fn judge_work(
    schema: &SchemaName,
    asked: &Result<Vec<Work>, NoAnswer>,
    members: &Result<Vec<Member>, NoAnswer>,
) -> Vec<Finding> {
    let work = match asked {
        Ok(work) => work,
        Err(reason) => return vec![STUCK.not_made(reason)],
    };
    let mut findings = Vec::new();
    for one in work {
        let about = |finding: Finding| finding.about(&one.category);
        if one.expired > 0 {
            let seen = format!(
                "{} rows of {} are leased although their leases ended more than a minute ago",
                many(one.expired, MANY),
                one.category
            );
            findings.push(about(
                STUCK
                    .warning(seen, "nobody claims this category, or somebody keeps the rows locked")
                    .next("start an instance with a handler for it; if there is one, look for long transactions in pg_stat_activity"),
            ));
        }
        if one.unowned > 0 {
            let seen = format!(
                "{} rows of {} are leased to somebody who is no member",
                many(one.unowned, MANY),
                one.category
            );
            findings.push(about(
                STUCK
                    .warning(seen, "nobody will settle them, and they wait for the end of their leases")
                    .next(format!(
                        "{} for the instance_id of those rows",
                        advice::evict(schema, "instance_id")
                    )),
            ));
        }
    }
    findings.extend(members.as_ref().ok().and_then(|members| judge_unserved(work, members)));
    if findings.is_empty() {
        findings.push(STUCK.ok("no row is stuck"));
    }
    findings
}

/// Work that no living member runs.
fn judge_unserved(work: &[Work], members: &[Member]) -> Option<Finding> {
    let living = || members.iter().filter(|member| member.alive);
    let unserved = |one: &&Work| one.unfinished && !living().any(|member| member.runs(&one.category));
    let idle: Vec<String> = work.iter().filter(unserved).map(|one| one.category.clone()).collect();
    if idle.is_empty() {
        return None;
    }
    let (nobody, next) = if living().next().is_none() {
        ("no instance is alive", "start an instance: `workpump relay`, or the service that embeds the pump")
    } else {
        ("no living instance runs it", "start an instance with a handler or a publisher for it")
    };
    let seen = format!("there is work ({}), and {nobody}", listed(&idle));
    Some(STUCK.warning(seen, "nobody will do it").next(next))
}

/// Rows given up.
pub(super) fn judge_dead_letters(asked: &Result<Vec<(String, i64)>, NoAnswer>) -> Finding {
    let letters = match asked {
        Ok(letters) => letters,
        Err(reason) => return DEAD_LETTERS.not_made(reason),
    };
    let some: Vec<String> = letters
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(category, count)| format!("{} of {category}", many(*count, MANY_LETTERS)))
        .collect();
    if some.is_empty() {
        return DEAD_LETTERS.ok("there are no dead letters");
    }
    DEAD_LETTERS
        .note(
            format!("dead letters: {}", listed(&some)),
            "these rows were given up, and nobody will handle them",
        )
        .next("read error and failure_reason in wh_dead_letters")
}

/// A count that stopped.
fn many(count: i64, most: i64) -> String {
    if count > most { format!("more than {most}") } else { count.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity::{self, Note, Ok as Well, Warning};
    use super::*;

    fn member(alive: bool) -> Member {
        Member {
            id: Uuid::nil(),
            service: "shop".to_owned(),
            host: "h".to_owned(),
            process: 1,
            beat_age: 300.0,
            alive,
            gate: Some("available".to_owned()),
            gate_reason: None,
            version: Some(LIBRARY_VERSION.to_owned()),
            categories: None,
        }
    }

    fn schema() -> SchemaName {
        SchemaName::new("public").unwrap()
    }

    fn severities(findings: &[Finding]) -> Vec<(&'static str, Severity)> {
        findings.iter().map(|finding| (finding.check, finding.severity)).collect()
    }

    #[test]
    fn stale_members_broken_gates_and_other_versions_are_told() {
        let judge = |member| severities(&judge_members(&schema(), &Ok(vec![member])))[1..].to_vec();
        assert!(judge(member(true)).is_empty());
        assert_eq!(judge(member(false)), [("instances.stale", Warning)]);
        let gate = Some("unavailable".to_owned());
        assert_eq!(judge(Member { gate, ..member(true) }), [("instances.gate", Warning)]);
        let version = Some("0.0.9".to_owned());
        assert_eq!(judge(Member { version, ..member(true) }), [("instances.versions", Note)]);
        let (gate, version) = (None, None);
        assert!(judge(Member { gate, version, ..member(true) }).is_empty(), "it never said");
    }

    #[test]
    fn a_release_under_way_is_fine_and_one_left_lying_is_not() {
        let judge = |count, age| judge_release(&Ok((count, age))).severity;
        assert_eq!([judge(0, 0.0), judge(2, 119.0), judge(2, 120.0)], [Well, Well, Warning]);
    }

    #[test]
    fn stuck_work_and_work_without_an_instance_are_told() {
        let work = |unfinished, expired, unowned| {
            vec![Work { category: "outbox".to_owned(), unfinished, expired, unowned }]
        };
        let judge = |work, alive| judge_work(&schema(), &Ok(work), &Ok(vec![member(alive)]));
        assert_eq!(severities(&judge(work(true, 0, 0), true)), [("instances.stuck_work", Well)]);
        assert_eq!(severities(&judge(work(false, 0, 0), false)), [("instances.stuck_work", Well)]);
        assert!(judge(work(true, 0, 0), false)[0].seen.contains("no instance is alive"));
        assert!(judge(work(true, 1_001, 0), true)[0].seen.starts_with("more than 1000 rows"));
        assert!(judge(work(true, 0, 3), true)[0].seen.starts_with("3 rows of outbox are leased to somebody"));
    }

    #[test]
    fn work_that_nobody_alive_runs_is_told() {
        let work = |category: &str| {
            Ok(vec![Work { category: category.to_owned(), unfinished: true, expired: 0, unowned: 0 }])
        };
        let runs = |alive, some: &[&str]| Member {
            categories: Some(some.iter().map(|one| (*one).to_owned()).collect()),
            ..member(alive)
        };
        let judge = |category, members| judge_work(&schema(), &work(category), &Ok(members)).remove(0);
        let fleet = || vec![runs(true, &["outbox"]), runs(false, &["inbox"])];
        assert_eq!(judge("outbox", fleet()).severity, Well);
        assert_eq!(judge("inbox", fleet()).seen, "there is work (inbox), and no living instance runs it");
        assert_eq!(
            judge("inbox", vec![runs(true, &[]), member(true)]).severity,
            Well,
            "one runs whatever there is"
        );
        assert!(runs(true, &["inbox", "receptor"]).named().ends_with(", runs inbox and receptor)"));
        assert!(
            runs(true, &[]).named().ends_with(", runs nothing)") && !member(true).named().contains("runs")
        );
    }

    #[test]
    fn dead_letters_are_a_note() {
        let judge = |count| judge_dead_letters(&Ok(vec![("inbox".to_owned(), count)]));
        assert_eq!(judge(0).severity, Well);
        let some = judge(100_001);
        assert_eq!((some.severity, some.seen.as_str()), (Note, "dead letters: more than 100000 of inbox"));
    }
}
