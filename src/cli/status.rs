//! `workpump status`

use clap::Args;

use super::{CliError, Database, Outcome, print};

/// The arguments of `workpump status`.
#[derive(Args)]
pub(super) struct Status {
    #[command(flatten)]
    database: Database,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let status = workpump::status(&self.database.url()?, &self.database.schema()?).await?;
        if self.json {
            print(&serde_json::to_string(&status).map_err(|e| CliError::Failed(e.to_string()))?);
            return Ok(Outcome::Well);
        }
        print(&format!("{status:?}"));
        Ok(Outcome::Well)
    }
}
