//! The doctor on real servers: every illness is brought about, found, and named with what helps.

mod common;

#[path = "doctor/connections.rs"]
mod connections;
#[path = "doctor/instances.rs"]
mod instances;
#[path = "doctor/program.rs"]
mod program;
#[path = "doctor/rights.rs"]
mod rights;
#[path = "doctor/schema.rs"]
mod schema;
#[path = "doctor/server.rs"]
mod server;

use tokio_postgres::Client;
use workpump::Diagnosis;
use workpump::doctor::{Finding, Severity};

/// An examination by one address. On a busy machine its time may be over before everything was looked at: that one is made again.
async fn examine(url: &str) -> Diagnosis {
    let mut tries = 0;
    loop {
        let diagnosis = workpump::doctor(url, None, "public").await.expect("a diagnosis");
        tries += 1;
        let cut_short = |finding: &Finding| finding.seen.contains("of this examination are over");
        if tries == 10 || !diagnosis.findings.iter().any(cut_short) {
            return diagnosis;
        }
    }
}

/// The findings of a check.
fn of<'a>(diagnosis: &'a Diagnosis, check: &str) -> Vec<&'a Finding> {
    diagnosis.findings.iter().filter(|finding| finding.check == check).collect()
}

/// The only finding of a check, of this weight.
fn only<'a>(diagnosis: &'a Diagnosis, check: &str, severity: Severity) -> &'a Finding {
    let found = of(diagnosis, check);
    assert!(
        found.len() == 1 && found[0].severity == severity,
        "{check} {severity:?}: {:#?}",
        diagnosis.findings
    );
    found[0]
}

/// Checks with a warning or an error, in the order of the report.
fn problems(diagnosis: &Diagnosis) -> Vec<&'static str> {
    let bad = diagnosis.findings.iter().filter(|finding| finding.severity >= Severity::Warning);
    bad.map(|finding| finding.check).collect()
}

/// Nothing but what is well and notes; says what else there is.
fn assert_healthy(diagnosis: &Diagnosis) {
    assert!(diagnosis.healthy && problems(diagnosis).is_empty(), "{:#?}", diagnosis.findings);
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}
