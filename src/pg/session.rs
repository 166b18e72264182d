//! Sessions: who opens them, who drives them, and what they are allowed to wait for.
//!
//! A PostgreSQL connection is driven by the runtime that opened it. The failure this prevents: a busy arbiter thread stalls a query
//! that another thread is waiting for. So every session but the heartbeat's is opened on a runtime of its own, the db-io runtime.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Socket, tls::NoTlsStream};
use tracing::{debug, info};

/// The server gives a statement up before the client does, so nothing is claimed for a caller who has left.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// The client's own limit for one call.
pub(crate) const CALL_DEADLINE: Duration = Duration::from_secs(25);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// One session of the pump's own.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    /// Set when the server said that a claim left something behind; taken by whoever asks.
    has_more: Arc<AtomicBool>,
}

impl Session {
    /// Opens a session on the current runtime, with server-side limits where the server takes them. A pooler refuses start-up
    /// options (08P01); then the limits are the client's alone.
    pub(crate) async fn open(config: &Config) -> Result<Self, tokio_postgres::Error> {
        let mut limited = config.clone();
        let own = config.get_options().unwrap_or_default();
        limited.options(format!("{own} -c statement_timeout={}", STATEMENT_TIMEOUT.as_millis()).trim_start());
        match Self::connect(&limited).await {
            Err(error) if error.code().is_some_and(|code| code.code() == "08P01") => {
                debug!(
                    "the server takes no start-up options, so it is a pooler; statement limits are the client's alone"
                );
                Self::connect(config).await
            }
            other => other,
        }
    }

    async fn connect(config: &Config) -> Result<Self, tokio_postgres::Error> {
        let (client, connection) = config.connect(NoTls).await?;
        let has_more = Arc::new(AtomicBool::new(false));
        tokio::spawn(drive(connection, Arc::clone(&has_more)));
        Ok(Self { client, has_more })
    }

    /// Whether a claim since the last call left something behind.
    pub(crate) fn take_has_more(&self) -> bool {
        self.has_more.swap(false, Ordering::AcqRel)
    }
}

/// Drives a connection to its end. Notices arrive before the answer they belong to.
async fn drive(mut connection: tokio_postgres::Connection<Socket, NoTlsStream>, has_more: Arc<AtomicBool>) {
    loop {
        match poll_fn(|cx| connection.poll_message(cx)).await {
            Some(Ok(AsyncMessage::Notice(notice))) if notice.message() == "whizbang.has_more=true" => {
                has_more.store(true, Ordering::Release);
            }
            Some(Ok(AsyncMessage::Notice(notice))) => info!(notice = notice.message(), "database notice"),
            Some(Ok(_)) => {}
            // After a terminal error the stream may repeat it for ever: the first one ends the session.
            Some(Err(error)) => {
                return debug!(error = %super::fault::describe(&error), "database session ended");
            }
            None => return,
        }
    }
}

/// Completes a parsed URL with what every session of the library wants.
pub(crate) fn prepare(mut config: Config) -> Config {
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    if config.get_application_name().is_none() {
        config.application_name("workpump");
    }
    config
}
