//! `workpump migrate`

use clap::Args;

use super::{CliError, Database, Outcome, print};

/// The arguments of `workpump migrate`.
#[derive(Args)]
pub(super) struct Migrate {
    #[command(flatten)]
    database: Database,
}

impl Migrate {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let schema = self.database.schema()?;
        let migrated = workpump::migrate(&self.database.url()?, &schema).await?;
        print(&format!("schema {schema}: {migrated:?}"));
        Ok(Outcome::Well)
    }
}
