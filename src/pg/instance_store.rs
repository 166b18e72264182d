//! Membership behind the engine's port, on a session of its own: neither the pool nor a handler can delay a heartbeat.
//!
//! The session is opened by whoever calls, so it is driven by the vital arbiter's runtime and by nothing else.

use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{Config, Row};
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{Beat, BeatAnswer, InstanceStore, PortFuture, StoreError};

use super::fault::{open_error, store_error};
use super::migrate::{self, MigrateError, SchemaState};
use super::schema_name::SchemaName;
use super::session::Session;
use super::statement::instance as statement;

/// A beat that takes longer is late, and says nothing about whether it was written. Below the engine's own limit.
const BEAT_DEADLINE: Duration = Duration::from_secs(8);

/// [`InstanceStore`] on PostgreSQL.
pub(crate) struct PgInstanceStore {
    schema: SchemaName,
    beat: String,
    deregister: String,
    direct: Config,
    session: Mutex<Option<Session>>,
}

impl PgInstanceStore {
    pub(crate) fn new(schema: &SchemaName, direct: Config) -> Self {
        Self {
            schema: schema.clone(),
            beat: statement::beat(schema),
            deregister: statement::deregister(schema),
            direct,
            session: Mutex::new(None),
        }
    }

    /// One call on the session. It is taken out for the call: when the answer is late, or the caller gives up first, the session goes
    /// with it, and the next beat opens a new one instead of waiting behind a dead socket.
    async fn with_session<T>(
        &self,
        instance: InstanceId,
        call: impl AsyncFnOnce(&Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let mut slot = self.session.lock().await;
        let kept = slot.take().filter(|session| !session.client.is_closed());
        let answered = timeout(BEAT_DEADLINE, async {
            let session = match kept {
                Some(session) => session,
                None => Session::open(&self.direct).await.map_err(|error| open_error(&error, instance))?,
            };
            let answer = call(&session).await.map_err(|error| store_error(&error, instance));
            Ok((session, answer))
        })
        .await
        .map_err(|_| {
            StoreError::Unavailable(format!(
                "no answer to the heartbeat within {} s",
                BEAT_DEADLINE.as_secs()
            ))
        })?;
        let (session, answer) = answered?;
        *slot = Some(session);
        answer
    }

    async fn beat_now(&self, beat: Beat) -> Result<BeatAnswer, StoreError> {
        let identity = &beat.identity;
        let metadata = json!({ "gate": "unconfigured", "library_version": env!("CARGO_PKG_VERSION") });
        let rows = self
            .with_session(identity.id, async |session: &Session| {
                session
                    .client
                    .query_typed(
                        &self.beat,
                        &[
                            (&identity.id.0, Type::UUID),
                            (&identity.service_name, Type::TEXT),
                            (&identity.host_name, Type::TEXT),
                            (&identity.process_id, Type::INT4),
                            (&metadata, Type::JSONB),
                            (&(beat.interval.as_secs().max(1) as i32), Type::INT4),
                            (&beat.lock_declared, Type::BOOL),
                            (&beat.accepts_work, Type::BOOL),
                        ],
                    )
                    .await
            })
            .await?;
        let accepted = rows.first().and_then(|row: &Row| row.try_get::<_, Option<bool>>(0).ok().flatten());
        Ok(if accepted == Some(false) { BeatAnswer::Evicted } else { BeatAnswer::Accepted })
    }
}

impl InstanceStore for PgInstanceStore {
    fn schema_ready(&self) -> PortFuture<'_, bool> {
        async move {
            let nobody = InstanceId(uuid::Uuid::nil());
            let state = self
                .with_session(nobody, async |session: &Session| {
                    Ok(migrate::schema_state(&session.client, self.schema.as_str()).await)
                })
                .await?;
            match state.map_err(|error| schema_error(error, nobody))? {
                SchemaState::Missing | SchemaState::Behind { .. } => Ok(false),
                SchemaState::Current | SchemaState::Ahead { .. } => Ok(true),
                SchemaState::NeedsNewerLibrary { required, .. } => Err(StoreError::Schema(format!(
                    "it needs workpump {required} or newer: upgrade this program"
                ))),
            }
        }
        .boxed()
    }

    fn beat(&self, beat: Beat) -> PortFuture<'_, BeatAnswer> {
        self.beat_now(beat).boxed()
    }

    fn deregister(&self, instance: InstanceId) -> PortFuture<'_, ()> {
        async move {
            self.with_session(instance, async |session: &Session| {
                session.client.query_typed(&self.deregister, &[(&instance.0, Type::UUID)]).await
            })
            .await
            .map(drop)
        }
        .boxed()
    }
}

fn schema_error(error: MigrateError, instance: InstanceId) -> StoreError {
    match error {
        MigrateError::Database { source, .. } => store_error(&source, instance),
        other => StoreError::Schema(other.to_string()),
    }
}
