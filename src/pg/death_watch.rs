//! The death watch behind the engine's port, on one more direct session.
//!
//! The rule: the wait for a lock and the verdict that follows it are one statement each, on a session that nothing else uses. The failure
//! this prevents: a wait of 20 s that holds up a beat, a ring, or a claim.

use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio_postgres::Config;
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{DatabaseTime, DeathWatch, PortFuture, StoreError, Suspect, SuspectVerdict};

use super::direct::DirectClient;
use super::kept_session::KeptSession;
use super::row::Timestamp;
use super::schema_name::SchemaName;
use super::statement::liveness as statement;

/// What a call may take beyond the wait that was asked for.
const MARGIN: Duration = Duration::from_secs(8);

/// [`DeathWatch`] on PostgreSQL. Its session has no limit for statements on the server: a watch waits, in slices of 100 ms.
pub(crate) struct PgDeathWatch {
    watch: String,
    evict: String,
    session: KeptSession<DirectClient>,
}

impl PgDeathWatch {
    /// Opens nothing yet. The session will be driven by the runtime of whoever calls.
    pub(crate) fn new(schema: &SchemaName, direct: Config) -> Self {
        Self {
            watch: statement::watch(schema),
            evict: statement::evict_suspect(schema),
            session: KeptSession::new(direct, None),
        }
    }

    /// Driven by this runtime instead.
    pub(crate) fn driven_by(mut self, io: Handle) -> Self {
        self.session = self.session.driven_by(io);
        self
    }

    async fn watch_now(
        &self,
        me: InstanceId,
        wait: Duration,
        census: bool,
    ) -> Result<Option<Suspect>, StoreError> {
        let seen = self
            .session
            .call(me, "death watch", wait + MARGIN, async |client| {
                let params = [
                    (&me.0 as _, Type::UUID),
                    (&wait.as_secs_f64() as _, Type::FLOAT8),
                    (&census as _, Type::BOOL),
                ];
                let row = client.query_typed_one(&self.watch, &params).await?;
                Ok((row.try_get::<_, Option<Uuid>>(0)?, row.try_get::<_, Option<Timestamp>>(1)?))
            })
            .await?;
        Ok(match seen {
            (Some(peer), Some(Timestamp(since))) => {
                Some(Suspect { peer: InstanceId(peer), since: DatabaseTime(since) })
            }
            _ => None,
        })
    }

    async fn evict_now(
        &self,
        me: InstanceId,
        suspect: Suspect,
        grace: Duration,
    ) -> Result<SuspectVerdict, StoreError> {
        let word = self
            .session
            .call(me, "verdict on a suspect", MARGIN, async |client| {
                let params = [
                    (&me.0 as _, Type::UUID),
                    (&suspect.peer.0 as _, Type::UUID),
                    (&Timestamp(suspect.since.0) as _, Type::TIMESTAMPTZ),
                    (&grace.as_secs_f64() as _, Type::FLOAT8),
                ];
                client.query_typed_one(&self.evict, &params).await?.try_get::<_, String>(0)
            })
            .await?;
        match word.as_str() {
            "early" => Ok(SuspectVerdict::Early),
            "alive" => Ok(SuspectVerdict::Alive),
            "beaten" => Ok(SuspectVerdict::Beaten),
            "evicted" => Ok(SuspectVerdict::Evicted),
            other => {
                Err(StoreError::Schema(format!("{other:?} is a verdict that this library does not know")))
            }
        }
    }
}

impl DeathWatch for PgDeathWatch {
    fn watch(&self, me: InstanceId, wait: Duration, census: bool) -> PortFuture<'_, Option<Suspect>> {
        self.watch_now(me, wait, census).boxed()
    }

    fn evict_suspect(
        &self,
        me: InstanceId,
        suspect: Suspect,
        grace: Duration,
    ) -> PortFuture<'_, SuspectVerdict> {
        self.evict_now(me, suspect, grace).boxed()
    }
}
