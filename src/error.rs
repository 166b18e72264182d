//! What can go wrong on the way in: each error names the value and the next step, and none shows a secret.

use workpump_actors::options::OptionsError;
use workpump_actors::tree::StartError;

use crate::config::ConfigError;
use crate::pg::fault::describe;
use crate::pg::migrate::MigrateError;
use crate::pg::schema_name::BadSchemaName;

/// Why the pump, or a tool on its tables, could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The database URL cannot be read.
    #[error("the {which} URL cannot be read ({cause}): use postgresql://user:password@host:port/database")]
    Url {
        /// `database` or `direct`.
        which: &'static str,
        /// What the parser said; it never repeats the URL.
        cause: String,
    },
    /// The database cannot be reached, or refused the login.
    #[error("cannot connect to the database: {0}")]
    Connect(String),
    /// The two URLs lead to different databases: rows would be stored in one and looked for in the other.
    #[error(
        "the direct URL leads to {leads_to} (database {direct:?}, the database URL to database {database:?}): let both lead to the same \
         database of the same primary, and look at each with `workpump doctor`"
    )]
    LeadsElsewhere {
        /// Where the direct URL leads to, as seen from the database URL.
        leads_to: String,
        /// The database at the database URL.
        database: String,
        /// The database at the direct URL.
        direct: String,
    },
    /// A statement failed.
    #[error("the database refused: {0}")]
    Database(String),
    /// The schema has no tables of this pump yet, or not all of them.
    #[error(
        "schema {schema:?} is not migrated: run `workpump migrate`, or build the pump with `.migrate(true)`"
    )]
    NotMigrated {
        /// The schema.
        schema: String,
    },
    /// The schema name cannot be used.
    #[error(transparent)]
    SchemaName(#[from] BadSchemaName),
    /// The schema could not be brought up to date, or needs a newer library.
    #[error(transparent)]
    Migrate(#[from] MigrateError),
    /// An option that cannot work.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nothing would handle anything.
    #[error("the pump has no publisher and no handler: add one with `.publisher(…)` or `.handler(…)`")]
    NothingToRun,
    /// Two handlers for the same thing.
    #[error("there are two {what}: each may be given once")]
    Twice {
        /// What was given twice.
        what: String,
    },
    /// An actor did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A thread or runtime could not be started.
    #[error("cannot start the pump's threads: {0}")]
    Threads(#[from] std::io::Error),
}

impl Error {
    pub(crate) fn database(error: &tokio_postgres::Error) -> Self {
        Self::Database(describe(error))
    }
}
