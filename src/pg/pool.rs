//! The pool for what comes beside claims and heartbeats.
//!
//! The rule: a session goes back into the pool only after it has answered. The failure this prevents: a session that is still busy with
//! a statement nobody waits for, or whose peer is gone, is handed to the next caller, who then waits behind it.

use std::future::Future;
use std::time::Duration;

use bb8::{ManageConnection, Pool};
use bb8_postgres::PostgresConnectionManager;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row};
use workpump_actors::instance::InstanceId;
use workpump_actors::port::StoreError;

use super::fault::{open_error, store_error};
use super::limits::{refuses_options, with_statement_timeout};
use super::session::{CALL_DEADLINE, OPEN_DEADLINE, OpenError, STATEMENT_TIMEOUT};

/// Sessions at most. One flush is under way at a time; the other is for what comes beside it.
const SIZE: u32 = 2;
/// How long a caller waits for one.
const WAIT: Duration = Duration::from_secs(11);

/// A small pool of sessions that the db-io runtime drives.
pub(crate) struct StatementPool(Pool<Manager>);

impl StatementPool {
    /// Opens nothing yet. Must be called inside a runtime: the pool starts a timer.
    pub(crate) fn new(config: &Config, io: Handle) -> Self {
        let manager = Manager {
            limited: PostgresConnectionManager::new(with_statement_timeout(config, STATEMENT_TIMEOUT), NoTls),
            plain: PostgresConnectionManager::new(config.clone(), NoTls),
            io,
        };
        let pool = Pool::builder()
            .max_size(SIZE)
            .test_on_check_out(false)
            .connection_timeout(WAIT)
            .error_sink(Box::new(LoggedErrors))
            .build_unchecked(manager);
        Self(pool)
    }

    /// One statement, with a deadline.
    pub(crate) async fn query(
        &self,
        instance: InstanceId,
        what: &str,
        text: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let mut session = self.0.get().await.map_err(|error| match error {
            bb8::RunError::User(error) => open_error(&error, instance),
            bb8::RunError::TimedOut => {
                StoreError::Unavailable(format!("no database session within {} s", WAIT.as_secs()))
            }
        })?;
        // Until there is an answer, also when this future is dropped: not fit for the next caller.
        session.busy = true;
        let answer =
            timeout(CALL_DEADLINE, session.client.query_typed(text, params)).await.map_err(|_| late(what))?;
        session.busy = false;
        answer.map_err(|error| store_error(&error, instance))
    }
}

/// What a call says that missed its deadline.
pub(crate) fn late(what: &str) -> StoreError {
    StoreError::Unavailable(format!("no answer to the {what} within {} s", CALL_DEADLINE.as_secs()))
}

/// A pooled session, and whether it owes somebody an answer.
struct Pooled {
    client: Client,
    busy: bool,
}

/// Opens sessions on the db-io runtime, which then drives them.
struct Manager {
    limited: PostgresConnectionManager<NoTls>,
    plain: PostgresConnectionManager<NoTls>,
    io: Handle,
}

impl ManageConnection for Manager {
    type Connection = Pooled;
    type Error = OpenError;

    fn connect(&self) -> impl Future<Output = Result<Pooled, OpenError>> + Send {
        let (limited, plain) = (self.limited.clone(), self.plain.clone());
        let opened = self.io.spawn(async move {
            let opening = async {
                match limited.connect().await {
                    Err(error) if refuses_options(&error) => plain.connect().await,
                    other => other,
                }
            };
            timeout(OPEN_DEADLINE, opening).await.map_err(|_| OpenError::Late)?.map_err(OpenError::Refused)
        });
        async move {
            match opened.await {
                Ok(client) => client.map(|client| Pooled { client, busy: false }),
                // The runtime is shutting down: nothing will ever be asked of this session.
                Err(_) => std::future::pending().await,
            }
        }
    }

    async fn is_valid(&self, session: &mut Pooled) -> Result<(), OpenError> {
        Ok(session.client.check_connection().await?)
    }

    fn has_broken(&self, session: &mut Pooled) -> bool {
        session.busy || session.client.is_closed()
    }
}

/// What the pool would otherwise keep to itself.
#[derive(Debug, Clone, Copy)]
struct LoggedErrors;

impl bb8::ErrorSink<OpenError> for LoggedErrors {
    fn sink(&self, error: OpenError) {
        tracing::warn!(%error, "could not open a pooled database session");
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<OpenError>> {
        Box::new(*self)
    }
}
