//! Sessions: who opens them, who drives them, and what they are allowed to wait for.
//!
//! A PostgreSQL connection is driven by the runtime that opened it. The failure this prevents: a busy arbiter thread stalls a query
//! that another thread is waiting for. So every session but the heartbeat's is opened on a runtime of its own, the db-io runtime.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Socket, tls::NoTlsStream};
use tracing::{debug, info};
use uuid::Uuid;

use super::fault::describe;
use super::limits::{Limits, refuses_options};
use super::statement::direct as statement;

/// The server gives a statement up before the client does, so nothing is claimed for a caller who has left. Behind a pooler, which
/// takes no such limit, `release_unheld` makes good for it.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// The client's own limit for one call.
pub(crate) const CALL_DEADLINE: Duration = Duration::from_secs(25);
/// The limit for opening a session, login included: `connect_timeout` ends with the socket, and a server may accept and stay silent.
pub(crate) const OPEN_DEADLINE: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A dead peer is noticed within these, before the server notices ours (its limits are longer).
const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEPALIVE_RETRIES: u32 = 3;
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(4);
/// What the driver uses when nothing was said.
const DRIVER_KEEPALIVE_IDLE: Duration = Duration::from_hours(2);

/// Why a session could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// Nobody answered in time.
    #[error("no answer to the login within {} s", OPEN_DEADLINE.as_secs())]
    Late,
    /// The server or the network refused.
    #[error("{}", describe(.0))]
    Refused(#[from] tokio_postgres::Error),
    /// A pooler answered, and only the server itself will do.
    #[error("not a direct connection: {0}")]
    NotDirect(String),
}

/// One session of the pump's own.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    /// Set when the server said that a claim left something behind; taken by whoever asks.
    has_more: Arc<AtomicBool>,
    /// What was sent along to see whether it shows back; none where options are refused.
    mark: Option<String>,
    /// Its other half lives as long as the connection.
    end: watch::Receiver<()>,
}

impl Session {
    /// Opens a session on the current runtime, with server-side limits where the server takes them.
    pub(crate) async fn open(config: &Config) -> Result<Self, OpenError> {
        Self::open_with(config, STATEMENT_TIMEOUT).await
    }

    /// The same with another limit for statements.
    pub(crate) async fn open_with(config: &Config, statement: Duration) -> Result<Self, OpenError> {
        Self::within_deadline(Self::connect(config, Limits::new(Some(statement)), None)).await
    }

    /// One that may lead through a pooler, and can tell whether it does: see [`Session::backend`].
    pub(crate) async fn open_marked(config: &Config) -> Result<Self, OpenError> {
        let mark = Uuid::now_v7().to_string();
        let mut limits = Limits::new(Some(STATEMENT_TIMEOUT));
        // It sleeps by design.
        limits.add("idle_session_timeout", "0");
        limits.add(statement::MARK, mark.as_str());
        Self::within_deadline(Self::connect(config, limits, Some(mark))).await
    }

    async fn within_deadline(
        opening: impl Future<Output = Result<Self, tokio_postgres::Error>>,
    ) -> Result<Self, OpenError> {
        timeout(OPEN_DEADLINE, opening).await.map_err(|_| OpenError::Late)?.map_err(OpenError::Refused)
    }

    async fn connect(
        config: &Config,
        mut limits: Limits,
        mark: Option<String>,
    ) -> Result<Self, tokio_postgres::Error> {
        let (client, connection, mark) = match limits.connect(config).await {
            Err(error) if refuses_options(&error) => {
                let (client, connection) = config.connect(NoTls).await?;
                (client, connection, None)
            }
            opened => opened.map(|(client, connection)| (client, connection, mark))?,
        };
        let has_more = Arc::new(AtomicBool::new(false));
        let (lives, end) = watch::channel(());
        tokio::spawn(drive(connection, Arc::clone(&has_more), lives));
        Ok(Self { client, has_more, mark, end })
    }

    /// The backend at the other end, if the mark shows back in it: then it is the only one. `None`: a pooler is between.
    pub(crate) async fn backend(&self) -> Result<Option<i32>, tokio_postgres::Error> {
        let Some(mark) = &self.mark else { return Ok(None) };
        let names: [&str; 0] = [];
        let params = [(&statement::MARK as _, Type::TEXT), (&names.as_slice() as _, Type::TEXT_ARRAY)];
        let row = self.client.query_typed_one(statement::INTRODUCE, &params).await?;
        let shown: Option<&str> = row.try_get(2)?;
        (shown == Some(mark.as_str())).then(|| row.try_get(0)).transpose()
    }

    /// Resolves when the connection has ended, however that came about.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut end = self.end.clone();
        async move { while end.changed().await.is_ok() {} }
    }

    /// Whether a claim since the last call left something behind.
    pub(crate) fn take_has_more(&self) -> bool {
        self.has_more.swap(false, Ordering::AcqRel)
    }
}

/// Drives a connection to its end, and lets go of `_lives` then. Notices arrive before the answer they belong to.
async fn drive(
    mut connection: tokio_postgres::Connection<Socket, NoTlsStream>,
    has_more: Arc<AtomicBool>,
    _lives: watch::Sender<()>,
) {
    loop {
        match poll_fn(|cx| connection.poll_message(cx)).await {
            Some(Ok(AsyncMessage::Notice(notice))) if notice.message() == "whizbang.has_more=true" => {
                has_more.store(true, Ordering::Release);
            }
            Some(Ok(AsyncMessage::Notice(notice))) => info!(notice = notice.message(), "database notice"),
            Some(Ok(_)) => {}
            // After a terminal error the stream may repeat it for ever: the first one ends the session.
            Some(Err(error)) => {
                return debug!(error = %describe(&error), "database session ended");
            }
            None => return,
        }
    }
}

/// Completes a parsed URL with what every session of the library wants and the URL did not say.
pub(crate) fn prepare(mut config: Config) -> Config {
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    if config.get_application_name().is_none() {
        config.application_name("workpump");
    }
    if config.get_keepalives_idle() == DRIVER_KEEPALIVE_IDLE {
        config.keepalives_idle(KEEPALIVE_IDLE);
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(KEEPALIVE_INTERVAL);
    }
    if config.get_keepalives_retries().is_none() {
        config.keepalives_retries(KEEPALIVE_RETRIES);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    config
}
