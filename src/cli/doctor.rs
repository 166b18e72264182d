//! `workpump doctor`
//!
//! The rule: the table says the same as the JSON form, problems first, each with its next step; what is well takes one line each.

use std::fmt::Write;

use clap::Args;
use workpump::doctor::{Finding, Severity};

use super::{CliError, Database, Outcome, from_env, print};

/// The arguments of `workpump doctor`.
#[derive(Args)]
pub(super) struct Doctor {
    #[command(flatten)]
    database: Database,
    /// The same database without a pooler in between, for notifications and locks [env: WORKPUMP_DIRECT_URL]
    #[arg(long, value_name = "URL")]
    direct_url: Option<String>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let direct =
            self.direct_url.clone().map_or_else(|| from_env("WORKPUMP_DIRECT_URL"), |url| Ok(Some(url)))?;
        let (database, schema) = (self.database.url()?, self.database.schema()?);
        let diagnosis = workpump::doctor(&database, direct.as_deref(), &schema).await?;
        if self.json {
            print(&serde_json::to_string(&diagnosis).map_err(|e| CliError::Failed(e.to_string()))?);
        } else {
            print(&table(&diagnosis));
        }
        Ok(if diagnosis.healthy { Outcome::Well } else { Outcome::Flawed })
    }
}

fn table(diagnosis: &workpump::Diagnosis) -> String {
    let counts = diagnosis.counts;
    let mut text = format!(
        "schema {}, workpump {}: {}\n",
        diagnosis.schema,
        diagnosis.library_version,
        if diagnosis.healthy { "healthy" } else { "not healthy" }
    );
    let _ = writeln!(
        text,
        "{}, {}, {}, {} ok",
        counted(counts.errors, "error"),
        counted(counts.warnings, "warning"),
        counted(counts.notes, "note"),
        counts.ok
    );
    let width = diagnosis.findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    for finding in &diagnosis.findings {
        write_finding(&mut text, finding, width);
    }
    text.truncate(text.trim_end().len());
    text
}

fn write_finding(text: &mut String, finding: &Finding, width: usize) {
    if finding.severity != Severity::Ok || !text.contains("\nok ") {
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "{:<7}  {:<width$}  {}",
        finding.severity.as_str(),
        finding.check,
        plain(&finding.seen)
    );
    for (word, said) in [("why", &finding.why), ("next", &finding.next_step)] {
        if let Some(said) = said {
            let _ = writeln!(text, "         {word:<4}  {}", plain(said));
        }
    }
}

/// Names may hold anything: what would move the cursor is left out.
fn plain(said: &str) -> String {
    said.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_said_in_english_and_names_cannot_move_the_cursor() {
        assert_eq!(
            [counted(0, "note"), counted(1, "note"), counted(2, "note")],
            ["0 notes", "1 note", "2 notes"]
        );
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a [2Jb c");
    }
}
