//! The work tables behind the engine's port: one trip a batch, whatever the batch holds.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Config, Row};
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{
    ArmMode, Armed, ClaimRequest, Claimed, Doorbell, PortFuture, SettleItem, Settled, StoreError, Verdict,
    WorkStore,
};
use workpump_actors::work::{ClaimEpoch, WorkKey};

use super::claim_session::ClaimSession;
use super::fault::store_error;
use super::pool::StatementPool;
use super::row;
use super::schema_name::SchemaName;
use super::statement::work as statement;

struct Texts {
    claim: String,
    settle: String,
    release_unheld: String,
    next_claimable: String,
    pass_ring: String,
}

/// [`WorkStore`] on PostgreSQL: claims on a session of their own, everything else through a small pool.
pub(crate) struct PgWorkStore {
    texts: Texts,
    session: ClaimSession,
    pool: Arc<StatementPool>,
    keep_completed: bool,
}

impl PgWorkStore {
    /// Opens nothing yet: sessions come with the first call.
    pub(crate) fn new(
        schema: &SchemaName,
        pooled: &Config,
        direct: Config,
        io: Handle,
        keep_completed: bool,
    ) -> Self {
        let pool = Arc::new(StatementPool::new(pooled, io.clone()));
        Self {
            texts: Texts {
                claim: statement::claim(schema),
                settle: statement::settle(schema),
                release_unheld: statement::release_unheld(schema),
                next_claimable: statement::next_claimable(schema),
                pass_ring: statement::pass_ring(schema),
            },
            session: ClaimSession::new(schema, direct, pooled, io),
            pool,
            keep_completed,
        }
    }

    /// The small pool, for what else comes beside claims.
    pub(crate) fn pool(&self) -> Arc<StatementPool> {
        Arc::clone(&self.pool)
    }

    async fn claim_now(&self, request: ClaimRequest) -> Result<Claimed, StoreError> {
        let categories: Vec<&str> = request.categories.iter().map(|category| category.as_str()).collect();
        self.session
            .call(request.instance, "claim", async |session| {
                session.take_has_more();
                let rows = session
                    .client
                    .query_typed(
                        &self.texts.claim,
                        &[
                            (&request.instance.0, Type::UUID),
                            (&(request.max_rows as i32), Type::INT4),
                            (&(request.lease.as_secs() as i32), Type::INT4),
                            (&(request.partition_count as i32), Type::INT4),
                            (&categories, Type::TEXT_ARRAY),
                            (&(request.stream_run as i32), Type::INT4),
                            (&(request.max_bytes.min(i64::MAX as u64) as i64), Type::INT8),
                        ],
                    )
                    .await?;
                Ok(Claimed { works: row::claimed(&rows)?, has_more: session.take_has_more() })
            })
            .await
    }

    async fn settle_now(&self, instance: InstanceId, items: Vec<SettleItem>) -> Result<Settled, StoreError> {
        let columns = Columns::from(&items);
        let rows = self
            .pool
            .query(
                instance,
                "settlement",
                &self.texts.settle,
                &[
                    (&instance.0, Type::UUID),
                    (&columns.categories, Type::TEXT_ARRAY),
                    (&columns.ids, Type::UUID_ARRAY),
                    (&columns.epochs, Type::INT8_ARRAY),
                    (&columns.verdicts, Type::TEXT_ARRAY),
                    (&columns.after, Type::INT8_ARRAY),
                    (&columns.reasons, Type::INT4_ARRAY),
                    (&columns.errors, Type::TEXT_ARRAY),
                    (&self.keep_completed, Type::BOOL),
                ],
            )
            .await?;
        let fenced = rows
            .iter()
            .map(|row| Ok(row::key(row.try_get(0)?, row.try_get(1)?)))
            .collect::<Result<Vec<_>, tokio_postgres::Error>>()
            .map_err(|error| store_error(&error, instance))?;
        Ok(Settled { applied: items.len() - fenced.len(), fenced })
    }

    async fn release_unheld_now(
        &self,
        instance: InstanceId,
        held: Vec<(WorkKey, ClaimEpoch)>,
    ) -> Result<u64, StoreError> {
        let ids: Vec<Uuid> = held.iter().map(|(key, _)| key.id.0).collect();
        let epochs: Vec<i64> = held.iter().map(|(_, epoch)| epoch.0).collect();
        let mut total = 0;
        loop {
            let rows = self
                .pool
                .query(
                    instance,
                    "release of unheld rows",
                    &self.texts.release_unheld,
                    &[(&instance.0, Type::UUID), (&ids, Type::UUID_ARRAY), (&epochs, Type::INT8_ARRAY)],
                )
                .await?;
            let released: i32 = first(&rows, instance)?.unwrap_or(0);
            total += u64::from(released.unsigned_abs());
            if released < 1 {
                return Ok(total);
            }
        }
    }

    /// On the session of claims: an instance that sleeps without polls learns by it that the session is dead.
    async fn next_claimable_now(&self, instance: InstanceId) -> Result<Option<Duration>, StoreError> {
        let rows = self
            .session
            .call(instance, "next due time", async |session| {
                session.client.query_typed(&self.texts.next_claimable, &[(&instance.0, Type::UUID)]).await
            })
            .await?;
        let milliseconds: Option<i64> = first(&rows, instance)?;
        Ok(milliseconds.map(|milliseconds| Duration::from_millis(milliseconds.max(0).unsigned_abs())))
    }

    async fn pass_ring_now(&self, instance: InstanceId) -> Result<bool, StoreError> {
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&instance.0, Type::UUID)];
        let rows =
            self.pool.query(instance, "ring that is passed on", &self.texts.pass_ring, &params).await?;
        Ok(first::<bool>(&rows, instance)?.unwrap_or_default())
    }
}

/// Armed is the session that claims. Rings are passed on beside it: it may be waiting for the lock.
impl Doorbell for PgWorkStore {
    fn arm(&self, instance: InstanceId, wait: Duration, mode: ArmMode) -> PortFuture<'_, Option<Armed>> {
        self.session.arm(instance, wait, mode).boxed()
    }

    fn disarm(&self, instance: InstanceId) -> PortFuture<'_, ()> {
        self.session.disarm(instance).boxed()
    }

    fn pass_ring(&self, instance: InstanceId) -> PortFuture<'_, bool> {
        self.pass_ring_now(instance).boxed()
    }
}

impl WorkStore for PgWorkStore {
    fn claim(&self, request: ClaimRequest) -> PortFuture<'_, Claimed> {
        self.claim_now(request).boxed()
    }

    fn settle(&self, instance: InstanceId, items: Vec<SettleItem>) -> PortFuture<'_, Settled> {
        self.settle_now(instance, items).boxed()
    }

    fn release_unheld(&self, instance: InstanceId, held: Vec<(WorkKey, ClaimEpoch)>) -> PortFuture<'_, u64> {
        self.release_unheld_now(instance, held).boxed()
    }

    fn next_claimable_in(&self, instance: InstanceId) -> PortFuture<'_, Option<Duration>> {
        self.next_claimable_now(instance).boxed()
    }
}

/// A flush as arrays. A flush of completions alone, the common case, sends the last four as null.
#[derive(Default)]
struct Columns<'a> {
    categories: Vec<&'static str>,
    ids: Vec<Uuid>,
    epochs: Vec<i64>,
    verdicts: Option<Vec<&'static str>>,
    after: Option<Vec<Option<i64>>>,
    reasons: Option<Vec<Option<i32>>>,
    errors: Option<Vec<Option<&'a str>>>,
}

impl<'a> From<&'a Vec<SettleItem>> for Columns<'a> {
    fn from(items: &'a Vec<SettleItem>) -> Self {
        let mut columns = Self {
            categories: items.iter().map(|item| item.key.category.as_str()).collect(),
            ids: items.iter().map(|item| item.key.id.0).collect(),
            epochs: items.iter().map(|item| item.epoch.0).collect(),
            ..Self::default()
        };
        if items.iter().all(|item| item.verdict == Verdict::Complete) {
            return columns;
        }
        let mut verdicts = Vec::with_capacity(items.len());
        let mut after = Vec::with_capacity(items.len());
        let mut reasons = Vec::with_capacity(items.len());
        let mut errors = Vec::with_capacity(items.len());
        for item in items {
            let (verdict, pause, reason, error) = match &item.verdict {
                Verdict::Complete => ("complete", None, None, None),
                Verdict::Release => ("release", None, None, None),
                Verdict::Retry { after, reason, error } => {
                    ("retry", Some(*after), Some(reason.code()), Some(error.as_str()))
                }
                Verdict::DeadLetter { reason, error } => {
                    ("dead_letter", None, Some(reason.code()), Some(error.as_str()))
                }
            };
            verdicts.push(verdict);
            after.push(pause.map(|pause| pause.as_millis().min(i64::MAX as u128) as i64));
            reasons.push(reason);
            errors.push(error);
        }
        columns.verdicts = Some(verdicts);
        columns.after = Some(after);
        columns.reasons = Some(reasons);
        columns.errors = Some(errors);
        columns
    }
}

fn first<'a, T: tokio_postgres::types::FromSql<'a>>(
    rows: &'a [Row],
    instance: InstanceId,
) -> Result<Option<T>, StoreError> {
    match rows.first() {
        Some(row) => row.try_get(0).map_err(|error| store_error(&error, instance)),
        None => Ok(None),
    }
}
