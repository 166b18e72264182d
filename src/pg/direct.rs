//! Direct sessions: opened past every pooler, and proved to be.
//!
//! The rule: a session counts as direct when a mark that was sent as a start-up option shows back in it, and for as long as the same
//! backend answers. The failure this prevents: an alive-lock taken in some session of a pooler, which keeps an instance alive that is
//! long gone, or loses the lock of one that is well.
//!
//! The limits themselves are no proof: on a Unix socket the server shows 0 for those of TCP, and some platforms know only a few of them.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket, tls::NoTlsStream};
use tracing::{debug, info, warn};
use uuid::Uuid;
use workpump_actors::port::{Notification, NotificationSender};

use super::fault::describe;
use super::limits::{Limits, refuses_options};
use super::session::{OPEN_DEADLINE, OpenError};
use super::statement::direct as statement;

/// A direct session. Dropping it closes the socket at once.
pub(crate) struct DirectClient {
    client: Client,
    backend: i32,
    driver: AbortHandle,
}

impl Drop for DirectClient {
    fn drop(&mut self) {
        self.end();
    }
}

impl DirectClient {
    /// Opens one on the current runtime. Its notifications go to `heard`, which is dropped when the session has ended.
    pub(crate) async fn open(
        config: &Config,
        statement: Option<Duration>,
        heard: Option<NotificationSender>,
    ) -> Result<Self, OpenError> {
        timeout(OPEN_DEADLINE, Self::connect(config, statement, heard)).await.map_err(|_| OpenError::Late)?
    }

    async fn connect(
        config: &Config,
        statement: Option<Duration>,
        heard: Option<NotificationSender>,
    ) -> Result<Self, OpenError> {
        let mark = Uuid::now_v7().to_string();
        let mut limits = Limits::new(statement);
        // It is idle by design, for as long as the instance lives.
        limits.add("idle_session_timeout", "0");
        limits.add(statement::MARK, mark.as_str());
        let (client, connection) = limits.connect(config).await.map_err(|error| {
            if refuses_options(&error) {
                OpenError::NotDirect(format!("start-up options are refused ({})", describe(&error)))
            } else {
                OpenError::Refused(error)
            }
        })?;
        let backend = Arc::new(AtomicI32::new(0));
        let driver = tokio::spawn(drive(connection, Arc::clone(&backend), heard)).abort_handle();
        let mut session = Self { client, backend: 0, driver };
        session.backend = session.introduce(&limits, &mark).await?;
        backend.store(session.backend, Ordering::Release);
        Ok(session)
    }

    /// The backend at the other end, after it has shown the mark.
    async fn introduce(&self, limits: &Limits, mark: &str) -> Result<i32, OpenError> {
        let names: Vec<&str> = limits.taken().iter().map(|(name, _)| *name).collect();
        let row = self
            .client
            .query_typed_one(
                statement::INTRODUCE,
                &[(&statement::MARK, Type::TEXT), (&names, Type::TEXT_ARRAY)],
            )
            .await?;
        let (backend, local): (i32, bool) = (row.try_get(0)?, row.try_get(1)?);
        let shown: Option<&str> = row.try_get(2)?;
        if shown != Some(mark) {
            return Err(OpenError::NotDirect("start-up options do not reach the server".to_owned()));
        }
        let in_force: Vec<Option<&str>> = row.try_get(3)?;
        for ((name, wanted), shown) in limits.taken().iter().zip(in_force) {
            // On a Unix socket there is no network to lose, and the server shows 0.
            if shown != Some(wanted) && !(local && name.starts_with("tcp_")) {
                warn!(setting = name, wanted, shown, "the server does not keep a limit of a direct session");
            }
        }
        Ok(backend)
    }

    /// To send statements by.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The process of the server that serves this session.
    pub(crate) fn backend(&self) -> i32 {
        self.backend
    }

    /// Ends the session without waiting for anything that is under way.
    pub(crate) fn end(&self) {
        self.driver.abort();
    }
}

/// Drives a connection to its end, and hands on what it hears.
async fn drive(
    mut connection: Connection<Socket, NoTlsStream>,
    backend: Arc<AtomicI32>,
    heard: Option<NotificationSender>,
) {
    loop {
        match poll_fn(|cx| connection.poll_message(cx)).await {
            Some(Ok(AsyncMessage::Notification(rung))) => {
                let own = rung.process_id() == backend.load(Ordering::Acquire);
                let (channel, payload) = (rung.channel().to_owned(), rung.payload().to_owned());
                // Nobody may be listening any more: the session still holds a lock.
                let _ = heard.as_ref().map(|heard| heard.send(Notification { channel, payload, own }));
            }
            Some(Ok(AsyncMessage::Notice(notice))) => info!(notice = notice.message(), "database notice"),
            Some(Ok(_)) => {}
            // After a terminal error the stream may repeat it for ever: the first one ends the session.
            Some(Err(error)) => return debug!(error = %describe(&error), "direct database session ended"),
            None => return,
        }
    }
}
