//! Renewals behind the engine's port, on a session of their own that the vital arbiter drives.
//!
//! The rule: a renewal answers for every row, and an answer that did not come says nothing. The failure this prevents: a handler that is
//! cancelled because the database was slow, or one that goes on without its lease.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_postgres::Config;
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{PortFuture, Renewal, RenewalStore, StoreError};
use workpump_actors::work::{ClaimEpoch, WorkKey};

use super::kept_session::KeptSession;
use super::row;
use super::schema_name::SchemaName;
use super::session::Session;
use super::statement::liveness as statement;

/// The limit for one call.
const DEADLINE: Duration = Duration::from_secs(8);
/// The server's, below it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(6);

/// [`RenewalStore`] on PostgreSQL. Needs no session state: it works through a transaction-mode pooler.
pub(crate) struct PgRenewalStore {
    renew: String,
    session: KeptSession<Session>,
}

impl PgRenewalStore {
    /// Opens nothing yet. The session will be driven by the runtime of whoever calls. When `direct` cannot be opened, `pooled` will do.
    pub(crate) fn new(schema: &SchemaName, direct: Config, pooled: Config) -> Self {
        let session = KeptSession::new(direct, Some(STATEMENT_TIMEOUT)).or_through(pooled);
        Self { renew: statement::renew(schema), session }
    }

    async fn renew_now(
        &self,
        instance: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        lease: Duration,
    ) -> Result<Vec<Renewal>, StoreError> {
        // Epochs only grow: of several for one row the greatest may be in force, and the others are lost for certain.
        let mut newest: HashMap<WorkKey, ClaimEpoch> = HashMap::with_capacity(items.len());
        for (key, epoch) in &items {
            newest.entry(*key).and_modify(|known| *known = (*known).max(*epoch)).or_insert(*epoch);
        }
        if newest.is_empty() {
            return Ok(Vec::new());
        }
        let answers = self.ask(instance, &newest, lease).await?;
        Ok(items
            .iter()
            .map(|(key, epoch)| match answers.get(key) {
                Some(renewal) if newest.get(key) == Some(epoch) => *renewal,
                _ => Renewal::Lost,
            })
            .collect())
    }

    /// What the database says of each row; nothing of one that is lost.
    async fn ask(
        &self,
        instance: InstanceId,
        newest: &HashMap<WorkKey, ClaimEpoch>,
        lease: Duration,
    ) -> Result<HashMap<WorkKey, Renewal>, StoreError> {
        let categories: Vec<&str> = newest.keys().map(|key| key.category.as_str()).collect();
        let ids: Vec<Uuid> = newest.keys().map(|key| key.id.0).collect();
        let epochs: Vec<i64> = newest.values().map(|epoch| epoch.0).collect();
        let seconds = lease.as_secs().clamp(1, i32::MAX as u64) as i32;
        self.session
            .call(instance, "renewal", DEADLINE, async |client| {
                let params = [
                    (&instance.0 as _, Type::UUID),
                    (&categories as _, Type::TEXT_ARRAY),
                    (&ids as _, Type::UUID_ARRAY),
                    (&epochs as _, Type::INT8_ARRAY),
                    (&seconds as _, Type::INT4),
                ];
                let rows = client.query_typed(&self.renew, &params).await?;
                rows.iter()
                    .map(|row| {
                        let key = row::key(row.try_get(0)?, row.try_get(1)?);
                        let renewed: bool = row.try_get(2)?;
                        Ok((key, if renewed { Renewal::Renewed } else { Renewal::Locked }))
                    })
                    .collect()
            })
            .await
    }
}

impl RenewalStore for PgRenewalStore {
    fn renew(
        &self,
        instance: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        lease: Duration,
    ) -> PortFuture<'_, Vec<Renewal>> {
        self.renew_now(instance, items, lease).boxed()
    }
}
