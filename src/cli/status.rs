//! `workpump status`
//!
//! The rule: the JSON form is the library's own account, field by field; the table shows the same figures, with ages in words.

use std::fmt::Write;

use clap::Args;

use super::{CliError, Database, Outcome, print};
use crate::age::age;

/// The arguments of `workpump status`.
#[derive(Args)]
pub(super) struct Status {
    #[command(flatten)]
    database: Database,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let status = workpump::status(&self.database.url()?, &self.database.schema()?).await?;
        if self.json {
            print(&serde_json::to_string(&status).map_err(|e| CliError::Failed(e.to_string()))?);
        } else {
            print(&tables(&status));
        }
        Ok(Outcome::Well)
    }
}

fn tables(status: &workpump::Status) -> String {
    let mut text = format!("schema {}\n\n", status.schema);
    let mut rows =
        vec![["category", "ready", "leased", "scheduled", "due", "dead", "oldest"].map(str::to_owned)];
    for one in &status.categories {
        let figures = [one.ready, one.leased, one.scheduled, one.due, one.dead_letters]
            .map(|figure| figure.to_string());
        let [ready, leased, scheduled, due, dead] = figures;
        let oldest = one.oldest_age_seconds.map_or_else(|| "-".to_owned(), age);
        rows.push([one.category.clone(), ready, leased, scheduled, due, dead, oldest]);
    }
    align(&mut text, &rows);
    text.push('\n');
    if status.instances.is_empty() {
        text.push_str("no instances");
        return text;
    }
    let head = [
        "instance",
        "service",
        "host",
        "pid",
        "alive",
        "last beat",
        "lock",
        "accepts",
        "gate",
        "leases",
        "runs",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for one in &status.instances {
        let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        rows.push([
            one.instance_id.to_string(),
            one.service_name.clone(),
            one.host_name.clone(),
            one.process_id.to_string(),
            yes(one.alive),
            age(one.heartbeat_age_seconds),
            yes(one.lock_declared),
            yes(one.accepts_work),
            one.gate.clone(),
            one.leases.to_string(),
            runs(one.categories.as_deref()),
        ]);
    }
    align(&mut text, &rows);
    for one in &status.instances {
        if let Some(reason) = &one.gate_reason {
            // Writing to a String cannot fail.
            let _ = write!(text, "\ngate of {}: {reason}", one.instance_id);
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// Columns two spaces apart: the first to the left, the others as wide as their widest entry.
fn align<const N: usize>(text: &mut String, rows: &[[String; N]]) {
    let mut widths = [0; N];
    for row in rows {
        for (width, entry) in widths.iter_mut().zip(row) {
            *width = (*width).max(entry.chars().count());
        }
    }
    for row in rows {
        let mut line = String::new();
        for (width, entry) in widths.iter().zip(row) {
            let _ = write!(line, "{entry:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// What a member runs, in one word.
fn runs(categories: Option<&[String]>) -> String {
    match categories {
        None => "all".to_owned(),
        Some([]) => "nothing".to_owned(),
        Some(some) => some.join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_did_not_say_what_it_runs_is_taken_to_run_all() {
        let some = ["inbox", "receptor"].map(str::to_owned);
        assert_eq!([runs(None), runs(Some(&[])), runs(Some(&some))], ["all", "nothing", "inbox,receptor"]);
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_entry() {
        let mut text = String::new();
        align(&mut text, &[["a", "bb"], ["ümlaut", "c"]].map(|row| row.map(str::to_owned)));
        assert_eq!(text, "a       bb\nümlaut  c\n");
    }
}
