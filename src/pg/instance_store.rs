//! Membership behind the engine's port, on a session of its own: neither the pool nor a handler can delay a heartbeat.
//!
//! The session is opened by whoever calls, so it is driven by the vital arbiter's runtime and by nothing else. Where the direct URL cannot
//! be opened, beats go through the pooled one: they need no session state, and a late proof of life is better than none.

use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio_postgres::Config;
use tokio_postgres::types::Type;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{Beat, BeatAnswer, InstanceStore, PortFuture, StoreError};

use super::fault::store_error;
use super::kept_session::KeptSession;
use super::migrate::{self, MigrateError, SchemaState};
use super::schema_name::SchemaName;
use super::session::Session;
use super::statement::instance as statement;

/// A beat that takes longer is late, and says nothing about whether it was written. Below the engine's own limit.
const BEAT_DEADLINE: Duration = Duration::from_secs(8);
/// The server's limit for one, below that.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(6);

/// [`InstanceStore`] on PostgreSQL.
pub(crate) struct PgInstanceStore {
    schema: SchemaName,
    beat: String,
    deregister: String,
    session: KeptSession<Session>,
}

impl PgInstanceStore {
    /// Opens nothing yet. When `direct` cannot be opened, `pooled` will do.
    pub(crate) fn new(schema: &SchemaName, direct: Config, pooled: Config) -> Self {
        Self {
            schema: schema.clone(),
            beat: statement::beat(schema),
            deregister: statement::deregister(schema),
            session: KeptSession::new(direct, Some(STATEMENT_TIMEOUT)).or_through(pooled),
        }
    }

    async fn beat_now(&self, beat: Beat) -> Result<BeatAnswer, StoreError> {
        let identity = &beat.identity;
        let mut metadata = json!({ "gate": beat.gate, "library_version": env!("CARGO_PKG_VERSION") });
        if let Some(reason) = &beat.gate_reason {
            metadata["gate_reason"] = json!(reason);
        }
        let interval = beat.interval.as_secs().max(1) as i32;
        let categories: Vec<&str> = beat.categories.iter().map(|category| category.as_str()).collect();
        let accepted = self
            .session
            .call(identity.id, "heartbeat", BEAT_DEADLINE, async |client| {
                let params = [
                    (&identity.id.0 as _, Type::UUID),
                    (&identity.service_name as _, Type::TEXT),
                    (&identity.host_name as _, Type::TEXT),
                    (&identity.process_id as _, Type::INT4),
                    (&metadata as _, Type::JSONB),
                    (&interval as _, Type::INT4),
                    (&beat.lock_declared as _, Type::BOOL),
                    (&beat.accepts_work as _, Type::BOOL),
                    (&categories as _, Type::TEXT_ARRAY),
                ];
                client.query_typed_one(&self.beat, &params).await?.try_get::<_, Option<bool>>(0)
            })
            .await?;
        Ok(if accepted == Some(false) { BeatAnswer::Evicted } else { BeatAnswer::Accepted })
    }
}

impl InstanceStore for PgInstanceStore {
    fn schema_ready(&self) -> PortFuture<'_, bool> {
        async move {
            let nobody = InstanceId(uuid::Uuid::nil());
            let state = self
                .session
                .call(nobody, "question for the schema", BEAT_DEADLINE, async |client| {
                    Ok(migrate::schema_state(client, self.schema.as_str()).await)
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
            self.session
                .call(instance, "farewell", BEAT_DEADLINE, async |client| {
                    client.query_typed(&self.deregister, &[(&instance.0, Type::UUID)]).await
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
