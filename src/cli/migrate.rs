//! `workpump migrate`

use clap::Args;

use super::{CliError, Database, Outcome, complain, print};

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
        let done = match migrated.applied.as_slice() {
            [] => "nothing to do".to_owned(),
            applied => format!("applied {}", applied.join(", ")),
        };
        print(&format!("schema {schema}: {done}"));
        if !migrated.unknown.is_empty() {
            complain(&format!(
                "a newer workpump was here, and lets this one run: {}",
                migrated.unknown.join(", ")
            ));
        }
        Ok(Outcome::Well)
    }
}
