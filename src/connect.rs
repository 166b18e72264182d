//! From a URL to a session, for tools that need one of their own.

use std::str::FromStr;

use tokio_postgres::{Client, Config};

use crate::error::Error;
use crate::pg::migrate::{LIBRARY_VERSION, MigrateError, SchemaState, schema_state};
use crate::pg::schema_name::SchemaName;
use crate::pg::session::{Session, prepare};
use crate::pg::statement::migrate as statement;

/// Reads a URL. The parser's words are passed on, the URL is not: it may hold a password.
pub(crate) fn parse(which: &'static str, url: &str) -> Result<Config, Error> {
    let config = Config::from_str(url).map_err(|error| {
        let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        Error::Url { which, cause }
    })?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(Error::Url { which, cause: "it names no host".to_owned() });
    }
    Ok(prepare(config))
}

/// Opens one session, driven by the current tokio runtime until the client is dropped.
pub async fn connect(url: &str) -> Result<Client, Error> {
    let config = parse("database", url)?;
    let session = Session::open(&config).await.map_err(|error| Error::Connect(error.to_string()))?;
    Ok(session.client)
}

/// Refuses a schema that this library cannot run on, with the next step.
pub async fn check_schema(client: &Client, schema: &str) -> Result<(), Error> {
    match schema_state(client, schema).await? {
        SchemaState::Current | SchemaState::Ahead { .. } => Ok(()),
        SchemaState::Missing | SchemaState::Behind { .. } => {
            Err(Error::NotMigrated { schema: schema.to_owned() })
        }
        SchemaState::NeedsNewerLibrary { migration, required } => {
            let (schema, own) = (schema.to_owned(), LIBRARY_VERSION.to_owned());
            Err(MigrateError::NeedsNewerLibrary { schema, migration, required, own }.into())
        }
    }
}

/// Drops a schema with everything in it, the pump's tables and whatever else there is. For schemas made to be thrown away.
pub async fn drop_schema(url: &str, schema: &str) -> Result<(), Error> {
    let text = statement::drop_schema(&SchemaName::new(schema)?);
    connect(url).await?.batch_execute(&text).await.map_err(|error| Error::database(&error))
}
