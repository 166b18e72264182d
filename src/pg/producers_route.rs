//! The way by which producers ring, behind the engine's port: through the database URL and the small pool, as a store does.
//!
//! The rule: a proof of NOTIFY is one statement in its own transaction, and goes where producers go, through any pooler. The failure this
//! prevents: a proof that holds on a private way, while what producers ring is lost on theirs.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{PortFuture, ProducersRoute};

use super::pool::StatementPool;
use super::statement::direct as statement;

/// [`ProducersRoute`] on PostgreSQL.
pub(crate) struct PgProducersRoute {
    pool: Arc<StatementPool>,
}

impl PgProducersRoute {
    /// On sessions of this pool.
    pub(crate) fn new(pool: Arc<StatementPool>) -> Self {
        Self { pool }
    }
}

impl ProducersRoute for PgProducersRoute {
    fn ring(&self, channel: String, payload: String) -> PortFuture<'_, ()> {
        async move {
            let params = [(&channel as _, Type::TEXT), (&payload as _, Type::TEXT)];
            let nobody = InstanceId(Uuid::nil());
            self.pool.query(nobody, "probe of NOTIFY", statement::NOTIFY, &params).await.map(drop)
        }
        .boxed()
    }
}
