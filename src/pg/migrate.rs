//! Brings a schema up to date.
//!
//! The rule: everything, the schema and the ledger included, happens in one transaction under one transaction-scoped advisory lock. Twenty
//! processes may start at once, directly or through a pooler, and one of them migrates; whoever dies or is cancelled leaves nothing. A
//! session-scoped lock would be stranded in the pooler and hang every later start.
//!
//! An older library never changes a newer schema: it runs on it when the ledger says that it may ([`SchemaState::Ahead`]), and is refused
//! otherwise. Asking for the state needs no right to create anything.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, GenericClient, IsolationLevel, NoTls, Transaction};

use super::fault::describe;
use super::schema_name::{BadSchemaName, SchemaName};
use super::session::{OPEN_DEADLINE, prepare as prepare_session};
use super::statement::migrate as sql;
use super::statement::migrate::{MIGRATIONS, Migration};

/// This library's version, which a ledger's `min_library` is compared with.
pub const LIBRARY_VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long the migration of somebody else is waited for.
const WAIT_FOR_MIGRATION: Duration = Duration::from_mins(1);
/// How long a single table of the pump is waited for. Longer, and everybody else queues behind this wait.
const WAIT_FOR_TABLE: Duration = Duration::from_secs(10);

/// What a call of [`migrate`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Migrated {
    /// The migrations applied by this call, in order. Empty: there was nothing to do.
    pub applied: Vec<String>,
    /// Migrations in the database that this library does not know: a newer library was here, and allows this one.
    pub unknown: Vec<String>,
}

/// How a schema relates to this library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// There is no schema, or nothing of the pump in it.
    Missing,
    /// These migrations are not applied yet.
    Behind {
        /// Their names.
        missing: Vec<String>,
    },
    /// All of this library's migrations, and nothing else.
    Current,
    /// Migrated by a newer library that lets this one run. Never migrate it.
    Ahead {
        /// The names this library does not know.
        unknown: Vec<String>,
    },
    /// Migrated by a newer library that this one may not run on.
    NeedsNewerLibrary {
        /// The migration that says so.
        migration: String,
        /// The oldest library it allows.
        required: String,
    },
}

/// Why a schema could not be brought up to date.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The schema name cannot be used.
    #[error(transparent)]
    SchemaName(#[from] BadSchemaName),
    /// A migration in the database differs from the one this library brings.
    #[error(
        "migration {name} in schema {schema:?} has checksum {applied}, but this library brings {embedded}: \
         restore the schema, or use the library that migrated it"
    )]
    Changed {
        /// The schema.
        schema: String,
        /// The migration.
        name: String,
        /// The checksum in the ledger.
        applied: String,
        /// The checksum of the embedded text.
        embedded: String,
    },
    /// The schema may only be used by a newer library (`WH004`).
    #[error(
        "schema {schema:?} needs workpump {required} or newer because of migration {migration}, this is {own}: upgrade this program"
    )]
    NeedsNewerLibrary {
        /// The schema.
        schema: String,
        /// The migration that says so.
        migration: String,
        /// The oldest library allowed.
        required: String,
        /// The version of this library.
        own: String,
    },
    /// The schema has migrations of a newer library and lacks some of this one.
    #[error(
        "schema {schema:?} has migrations unknown to workpump {own} ({}) and lacks {}: migrate it with the newer library",
        unknown.join(", "), missing.join(", ")
    )]
    Diverged {
        /// The schema.
        schema: String,
        /// Known only to the newer library.
        unknown: Vec<String>,
        /// Known only to this library.
        missing: Vec<String>,
        /// The version of this library.
        own: String,
    },
    /// Somebody else holds the migration lock.
    #[error(
        "waited {waited:?} for the migration lock of schema {schema:?}, held by {holder}: wait for it or end it, then start again"
    )]
    LockHeld {
        /// The schema.
        schema: String,
        /// Who holds it.
        holder: String,
        /// How long was waited.
        waited: Duration,
    },
    /// A table that a migration changes is in use.
    #[error(
        "migration {migration} waited {waited:?} for a table of schema {schema:?} that somebody has locked ({message}): \
         end that transaction, then start again"
    )]
    TableLocked {
        /// The schema.
        schema: String,
        /// The migration.
        migration: String,
        /// How long was waited.
        waited: Duration,
        /// What the server said.
        message: String,
    },
    /// The server took the connection and stayed silent.
    #[error("no answer to the login within {waited:?}: is this address a PostgreSQL server?")]
    NoAnswer {
        /// How long was waited.
        waited: Duration,
    },
    /// The database refused something, or went away. Nothing was changed.
    #[error("cannot {what}: {message}")]
    Database {
        /// What was tried.
        what: String,
        /// What the server said.
        message: String,
        /// The driver's error.
        source: tokio_postgres::Error,
    },
}

impl MigrateError {
    fn database(what: impl Into<String>, source: tokio_postgres::Error) -> Self {
        Self::Database { what: what.into(), message: describe(&source), source }
    }

    fn is_lock_timeout(error: &tokio_postgres::Error) -> bool {
        error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
    }
}

/// Connects to `url` and brings `schema` up to date. Dropping the future closes the connection, which rolls everything back.
pub async fn migrate(url: &str, schema: &str) -> Result<Migrated, MigrateError> {
    let config = url.parse().map_err(|e| MigrateError::database("read the database URL", e))?;
    let (mut client, connection) = timeout(OPEN_DEADLINE, prepare_session(config).connect(NoTls))
        .await
        .map_err(|_| MigrateError::NoAnswer { waited: OPEN_DEADLINE })?
        .map_err(|e| MigrateError::database("connect to migrate", e))?;
    let mut driver = Driver(tokio::spawn(connection));
    let migrated = migrate_on(&mut client, schema).await;
    drop(client);
    // The session says goodbye; how the connection ended no longer matters.
    let _ = (&mut driver.0).await;
    migrated
}

/// Ends the connection with its owner.
struct Driver(JoinHandle<Result<(), tokio_postgres::Error>>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Brings `schema` up to date on a connection that is not inside a transaction. Writes nothing when there is nothing to do.
pub async fn migrate_on(client: &mut Client, schema: &str) -> Result<Migrated, MigrateError> {
    let schema = SchemaName::new(schema)?;
    if let Ledger { pending, unknown, .. } = Ledger::read(client, &schema).await?.usable(&schema)?
        && pending.is_empty()
    {
        return Ok(Migrated { applied: Vec::new(), unknown });
    }
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .read_only(false)
        .start()
        .await
        .map_err(|e| MigrateError::database("begin the migration", e))?;
    prepare(&transaction).await?;
    if let Err(e) = transaction.execute_typed(sql::LOCK, &[(&schema.as_str(), Type::TEXT)]).await {
        drop(transaction);
        return Err(if MigrateError::is_lock_timeout(&e) {
            lock_held(client, &schema).await
        } else {
            MigrateError::database(format!("take the migration lock of schema {schema}"), e)
        });
    }
    let migrated = apply(&transaction, &schema).await?;
    transaction.commit().await.map_err(|e| MigrateError::database("commit the migration", e))?;
    Ok(migrated)
}

/// Whether `schema` is there and this library may run on it. Needs USAGE on the schema and SELECT on its ledger, no more.
pub async fn schema_state(client: &Client, schema: &str) -> Result<SchemaState, MigrateError> {
    let schema = SchemaName::new(schema)?;
    let ledger = Ledger::read(client, &schema).await?;
    if let Some(refusal) = ledger.too_new() {
        return Ok(refusal);
    }
    let ledger = ledger.usable(&schema)?;
    let names = |pending: &[&Migration]| pending.iter().map(|m| m.name.to_owned()).collect();
    Ok(match (ledger.exists, ledger.pending.as_slice(), ledger.unknown) {
        (true, [], unknown) if unknown.is_empty() => SchemaState::Current,
        (true, [], unknown) => SchemaState::Ahead { unknown },
        (true, pending, _) if pending.len() < MIGRATIONS.len() => {
            SchemaState::Behind { missing: names(pending) }
        }
        _ => SchemaState::Missing,
    })
}

/// What the ledger says, compared with the embedded migrations.
struct Ledger {
    schema_exists: bool,
    exists: bool,
    rows: Vec<(String, String, String)>,
    pending: Vec<&'static Migration>,
    unknown: Vec<String>,
}

impl Ledger {
    async fn read(client: &impl GenericClient, schema: &SchemaName) -> Result<Self, MigrateError> {
        let failed = |e| MigrateError::database(format!("read the migrations of schema {schema}"), e);
        let name = sql::ledger_name(schema);
        let found = client
            .query_typed_one(sql::EXISTS, &[(&schema.as_str(), Type::TEXT), (&name, Type::TEXT)])
            .await
            .map_err(failed)?;
        let (schema_exists, exists) = (found.get(0), found.get(1));
        let mut rows = Vec::new();
        if exists {
            let found = client.query_typed(&sql::read_ledger(schema), &[]).await.map_err(failed)?;
            rows = found.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
        }
        let applied = |name: &str| rows.iter().any(|(applied, ..): &(String, _, _)| applied == name);
        let pending = MIGRATIONS.iter().filter(|migration| !applied(migration.name)).collect();
        let known = |name: &str| MIGRATIONS.iter().any(|migration| migration.name == name);
        let unknown = rows.iter().map(|(name, ..)| name.clone()).filter(|name| !known(name)).collect();
        Ok(Self { schema_exists, exists, rows, pending, unknown })
    }

    /// The first row that demands a newer library than this one.
    fn too_new(&self) -> Option<SchemaState> {
        self.rows.iter().find(|(_, _, required)| !allows(required, LIBRARY_VERSION)).map(
            |(migration, _, required)| SchemaState::NeedsNewerLibrary {
                migration: migration.clone(),
                required: required.clone(),
            },
        )
    }

    /// Refuses a ledger that this library must not touch.
    fn usable(self, schema: &SchemaName) -> Result<Self, MigrateError> {
        let (schema, own) = (schema.as_str().to_owned(), LIBRARY_VERSION.to_owned());
        if let Some(SchemaState::NeedsNewerLibrary { migration, required }) = self.too_new() {
            return Err(MigrateError::NeedsNewerLibrary { schema, migration, required, own });
        }
        for migration in MIGRATIONS {
            let embedded = migration.checksum();
            if let Some((name, applied, _)) =
                self.rows.iter().find(|(name, applied, _)| name == migration.name && *applied != embedded)
            {
                return Err(MigrateError::Changed {
                    schema,
                    name: name.clone(),
                    applied: applied.clone(),
                    embedded,
                });
            }
        }
        if !self.unknown.is_empty() && !self.pending.is_empty() {
            let missing = self.pending.iter().map(|migration| migration.name.to_owned()).collect();
            return Err(MigrateError::Diverged { schema, unknown: self.unknown, missing, own });
        }
        Ok(self)
    }
}

async fn prepare(transaction: &Transaction<'_>) -> Result<(), MigrateError> {
    let prepare = format!("{}; {}", sql::PREPARE, sql::set_lock_timeout(WAIT_FOR_MIGRATION.as_millis()));
    transaction.batch_execute(&prepare).await.map_err(|e| MigrateError::database("prepare the migration", e))
}

/// Under the lock: looks again, since whoever held it before probably did the work, and applies what is left.
async fn apply(transaction: &Transaction<'_>, schema: &SchemaName) -> Result<Migrated, MigrateError> {
    let ledger = Ledger::read(transaction, schema).await?.usable(schema)?;
    let failed = |what: String| move |e| MigrateError::database(what, e);
    let timeout = sql::set_lock_timeout(WAIT_FOR_TABLE.as_millis());
    transaction.batch_execute(&timeout).await.map_err(failed("prepare the migration".to_owned()))?;
    if !ledger.schema_exists {
        let what = format!(
            "create schema {schema} (it does not exist; let a role with CREATE on the database make it)"
        );
        transaction.batch_execute(&sql::create_schema(schema)).await.map_err(failed(what))?;
    }
    if !ledger.exists {
        let what = format!("create the ledger in schema {schema}");
        transaction.batch_execute(&sql::create_ledger(schema)).await.map_err(failed(what))?;
    }
    let note = sql::insert_ledger(schema);
    for migration in &ledger.pending {
        transaction.batch_execute(&migration.sql_for(schema)).await.map_err(|e| {
            if MigrateError::is_lock_timeout(&e) {
                let (schema, migration) = (schema.as_str().to_owned(), migration.name.to_owned());
                MigrateError::TableLocked { schema, migration, waited: WAIT_FOR_TABLE, message: describe(&e) }
            } else {
                MigrateError::database(format!("apply migration {} to schema {schema}", migration.name), e)
            }
        })?;
        let checksum = migration.checksum();
        transaction
            .execute_typed(
                &note,
                &[
                    (&migration.name, Type::TEXT),
                    (&checksum, Type::TEXT),
                    (&migration.min_library, Type::TEXT),
                ],
            )
            .await
            .map_err(failed(format!("note migration {}", migration.name)))?;
    }
    let applied = ledger.pending.iter().map(|migration| migration.name.to_owned()).collect();
    Ok(Migrated { applied, unknown: ledger.unknown })
}

/// Names who holds the lock, for the person who has to decide whether to wait.
async fn lock_held(client: &Client, schema: &SchemaName) -> MigrateError {
    let holder = client.query_typed(sql::LOCK_HOLDER, &[(&schema.as_str(), Type::TEXT)]).await.ok();
    let holder = holder.and_then(|rows| rows.first().map(|row| row.get(0)));
    let holder = holder.unwrap_or_else(|| "a process that has ended meanwhile".to_owned());
    MigrateError::LockHeld { schema: schema.as_str().to_owned(), holder, waited: WAIT_FOR_MIGRATION }
}

/// Whether a schema that requires `required` may be used by version `own`. What is no version is a future format: not allowed.
fn allows(required: &str, own: &str) -> bool {
    let parse = |version: &str| -> Option<[u64; 3]> {
        let release = version.split(['-', '+']).next()?;
        let parts: Result<Vec<u64>, _> = release.split('.').map(str::parse).collect();
        parts.ok()?.try_into().ok()
    };
    matches!((parse(required), parse(own)), (Some(required), Some(own)) if required <= own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_nonsense_counts_as_newer() {
        assert!(allows("0.1.0", "0.1.0"));
        assert!(allows("0.9.0", "0.10.0"));
        assert!(!allows("0.10.0", "0.9.9"));
        assert!(!allows("1.0.0", "0.99.99"));
        assert!(!allows("2026-spring", "0.1.0"));
        assert!(!allows("", "0.1.0"));
    }
}
