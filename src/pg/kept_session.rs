//! A session that one duty keeps to itself, opened when it is first needed.
//!
//! The rule: it is taken out for a call and only put back after the answer. The failure this prevents: a call that waits behind the
//! statement of an earlier one that nobody waits for any more, on a socket that may be dead.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_postgres::{Client, Config};
use tracing::warn;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::StoreError;

use super::direct::DirectClient;
use super::fault::{open_error, store_error};
use super::session::{OpenError, Session};

/// How long a session on the second address serves before the first one is tried again.
pub(crate) const SECOND_BEST_FOR: Duration = Duration::from_mins(1);

/// What can be kept.
pub(crate) trait Keepable: Sized + Send + 'static {
    /// Opens one on the current runtime, with this limit for statements.
    fn open(
        config: &Config,
        statement: Option<Duration>,
    ) -> impl Future<Output = Result<Self, OpenError>> + Send;

    /// To send statements by.
    fn client(&self) -> &Client;
}

/// May lead through a pooler.
impl Keepable for Session {
    async fn open(config: &Config, statement: Option<Duration>) -> Result<Self, OpenError> {
        match statement {
            Some(statement) => Self::open_with(config, statement).await,
            None => Self::open(config).await,
        }
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

/// Leads to the server itself.
impl Keepable for DirectClient {
    async fn open(config: &Config, statement: Option<Duration>) -> Result<Self, OpenError> {
        Self::open(config, statement, None).await
    }

    fn client(&self) -> &Client {
        self.client()
    }
}

struct Kept<S> {
    session: S,
    /// After this it has served long enough; none for one on the first address.
    until: Option<Instant>,
}

impl<S: Keepable> Kept<S> {
    fn is_fit(&self) -> bool {
        !self.session.client().is_closed() && self.until.is_none_or(|until| Instant::now() < until)
    }
}

/// A session of one duty.
pub(crate) struct KeptSession<S> {
    config: Config,
    second_best: Option<Config>,
    statement: Option<Duration>,
    io: Option<Handle>,
    slot: Mutex<Option<Kept<S>>>,
}

impl<S: Keepable> KeptSession<S> {
    /// Opens nothing yet. The session will be driven by the runtime of whoever calls.
    pub(crate) fn new(config: Config, statement: Option<Duration>) -> Self {
        Self { config, second_best: None, statement, io: None, slot: Mutex::new(None) }
    }

    /// Driven by this runtime instead.
    pub(crate) fn driven_by(mut self, io: Handle) -> Self {
        self.io = Some(io);
        self
    }

    /// When the address cannot be opened, this one will do for a while.
    pub(crate) fn or_through(mut self, second_best: Config) -> Self {
        self.second_best = Some(second_best).filter(|other| *other != self.config);
        self
    }

    /// One call, answered within `deadline` or not at all; a new session is opened in the same time if need be.
    pub(crate) async fn call<T>(
        &self,
        instance: InstanceId,
        what: &str,
        deadline: Duration,
        call: impl AsyncFnOnce(&Client) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let mut slot = self.slot.lock().await;
        let fit = slot.take().filter(Kept::is_fit);
        let answered = timeout(deadline, async {
            let kept = match fit {
                Some(kept) => kept,
                None => self.open(deadline).await.map_err(|error| open_error(&error, instance))?,
            };
            let answer = call(kept.session.client()).await.map_err(|error| store_error(&error, instance));
            Ok((kept, answer))
        })
        .await
        .map_err(|_| {
            StoreError::Unavailable(format!("no answer to the {what} within {} s", deadline.as_secs()))
        })?;
        let (kept, answer) = answered?;
        *slot = Some(kept);
        answer
    }

    async fn open(&self, deadline: Duration) -> Result<Kept<S>, OpenError> {
        let Some(second_best) = &self.second_best else {
            return Ok(Kept { session: self.open_at(&self.config).await?, until: None });
        };
        // Half of the time, so that the other half is left for the second address.
        match timeout(deadline / 2, self.open_at(&self.config)).await.unwrap_or(Err(OpenError::Late)) {
            Ok(session) => Ok(Kept { session, until: None }),
            Err(error) => {
                let session = self.open_at(second_best).await?;
                warn!(%error, "no session on the direct URL, using the database URL for a minute");
                Ok(Kept { session, until: Some(Instant::now() + SECOND_BEST_FOR) })
            }
        }
    }

    async fn open_at(&self, config: &Config) -> Result<S, OpenError> {
        let Some(io) = &self.io else { return S::open(config, self.statement).await };
        let (config, statement) = (config.clone(), self.statement);
        match io.spawn(async move { S::open(&config, statement).await }).await {
            Ok(opened) => opened,
            // The runtime is shutting down.
            Err(_) => Err(OpenError::Late),
        }
    }
}
