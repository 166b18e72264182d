//! The alive-lock, notifications and pings behind the engine's port.
//!
//! The rule: a call that is not answered in time ends the session. The failure this prevents: an instance that believes in a lock on a
//! session which nobody serves any more.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{Config, Row};
use workpump_actors::instance::InstanceId;
use workpump_actors::message::MAX_CHANNEL_BYTES;
use workpump_actors::port::{DirectConnector, DirectSession, NotificationStream, PortFuture, StoreError};

use super::direct::DirectClient;
use super::fault::{open_error, store_error};
use super::schema_name::SchemaName;
use super::statement::direct as statement;

/// The limit for one call. A little above the client's TCP limits, which end a session first where the network is at fault.
const DEADLINE: Duration = Duration::from_secs(6);
/// The server's limit, below it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

struct Texts {
    claim: String,
    release: String,
    work_channel: String,
}

/// [`DirectConnector`] on PostgreSQL. Its sessions are driven by the db-io runtime, so that a busy arbiter delays no ring.
pub(crate) struct PgDirectConnector {
    direct: Config,
    io: Handle,
    texts: Arc<Texts>,
}

impl PgDirectConnector {
    /// Opens nothing yet.
    pub(crate) fn new(schema: &SchemaName, direct: Config, io: Handle) -> Self {
        let texts = Texts {
            claim: statement::claim_alive_lock(schema),
            release: statement::release_alive_lock(schema),
            work_channel: statement::work_channel(schema),
        };
        Self { direct, io, texts: Arc::new(texts) }
    }

    async fn open(&self) -> Result<(PgDirectSession, NotificationStream), StoreError> {
        let (sender, notifications) = NotificationStream::channel();
        let config = self.direct.clone();
        let opened = self
            .io
            .spawn(async move { DirectClient::open(&config, Some(STATEMENT_TIMEOUT), Some(sender)).await })
            .await
            .map_err(|_| StoreError::Unavailable("the pump's connections are shut down".to_owned()))?;
        let session = opened.map_err(|error| open_error(&error, nobody()))?;
        Ok((PgDirectSession { session, texts: Arc::clone(&self.texts) }, notifications))
    }
}

impl DirectConnector for PgDirectConnector {
    fn connect(&self) -> PortFuture<'_, (Box<dyn DirectSession>, NotificationStream)> {
        async move {
            let (session, notifications) = self.open().await?;
            Ok((Box::new(session) as Box<dyn DirectSession>, notifications))
        }
        .boxed()
    }
}

struct PgDirectSession {
    session: DirectClient,
    texts: Arc<Texts>,
}

impl PgDirectSession {
    /// One call with its deadline.
    async fn ask<T>(
        &self,
        what: &str,
        instance: InstanceId,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, StoreError> {
        if let Ok(answer) = timeout(DEADLINE, answer).await {
            return answer.map_err(|error| store_error(&error, instance));
        }
        self.session.end();
        let seconds = DEADLINE.as_secs();
        Err(StoreError::Unavailable(format!(
            "no answer to the {what} within {seconds} s: the session is ended"
        )))
    }

    /// One call about an instance that answers yes or no.
    async fn ask_about(&self, what: &str, text: &str, instance: InstanceId) -> Result<bool, StoreError> {
        let client = self.session.client();
        let row =
            self.ask(what, instance, client.query_typed_one(text, &[(&instance.0, Type::UUID)])).await?;
        value(&row, instance)
    }

    async fn ping_now(&self) -> Result<(), StoreError> {
        let answer = self.session.client().query_typed_one(statement::PING, &[]);
        let backend: i32 = value(&self.ask("ping", nobody(), answer).await?, nobody())?;
        if backend == self.session.backend() {
            return Ok(());
        }
        self.session.end();
        Err(StoreError::NotDirect("another backend of the server answered".to_owned()))
    }

    async fn listen_now(&self, channels: Vec<String>) -> Result<(), StoreError> {
        if let Some(bad) = channels.iter().find(|name| name.len() > MAX_CHANNEL_BYTES || name.contains('\0'))
        {
            let message =
                format!("channel {bad:?} cannot be listened to: at most {MAX_CHANNEL_BYTES} bytes, no NUL");
            return Err(StoreError::Rejected { code: "42622".to_owned(), message });
        }
        let text = statement::listen(&channels);
        self.ask("LISTEN", nobody(), self.session.client().batch_execute(&text)).await
    }

    async fn unlisten_now(&self, channels: Vec<String>) -> Result<(), StoreError> {
        let text = statement::unlisten(&channels);
        self.ask("UNLISTEN", nobody(), self.session.client().batch_execute(&text)).await
    }

    async fn notify_now(&self, channel: String, payload: String) -> Result<(), StoreError> {
        let params = [(&channel as _, Type::TEXT), (&payload as _, Type::TEXT)];
        let rung = self.session.client().execute_typed(statement::NOTIFY, &params);
        self.ask("NOTIFY", nobody(), rung).await.map(drop)
    }
}

impl DirectSession for PgDirectSession {
    fn claim_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool> {
        self.ask_about("claim of the alive-lock", &self.texts.claim, instance).boxed()
    }

    fn release_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool> {
        self.ask_about("release of the alive-lock", &self.texts.release, instance).boxed()
    }

    fn listen(&self, channels: Vec<String>) -> PortFuture<'_, ()> {
        self.listen_now(channels).boxed()
    }

    fn unlisten(&self, channels: Vec<String>) -> PortFuture<'_, ()> {
        self.unlisten_now(channels).boxed()
    }

    fn notify(&self, channel: String, payload: String) -> PortFuture<'_, ()> {
        self.notify_now(channel, payload).boxed()
    }

    fn ping(&self) -> PortFuture<'_, ()> {
        self.ping_now().boxed()
    }

    fn work_channel(&self, instance: InstanceId) -> PortFuture<'_, String> {
        async move {
            let params = [(&instance.0 as _, Type::UUID)];
            let answer = self.session.client().query_typed_one(&self.texts.work_channel, &params);
            value(&self.ask("name of the channel", instance, answer).await?, instance)
        }
        .boxed()
    }
}

fn value<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    instance: InstanceId,
) -> Result<T, StoreError> {
    row.try_get(0).map_err(|error| store_error(&error, instance))
}

/// For calls that are about no instance in particular.
fn nobody() -> InstanceId {
    InstanceId(uuid::Uuid::nil())
}
