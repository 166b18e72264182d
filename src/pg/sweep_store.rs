//! The backstop sweep and the release of what the evicted held, behind the engine's port, through the small pool.
//!
//! The rule: an eviction and the release that follows it are transactions of their own, and no pass touches more than a thousand rows.
//! The failure this prevents: a dead instance with a million rows that holds up every claim while it is tidied away.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use tracing::debug;
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{PortFuture, StoreError, SweepStore, Swept};

use super::fault::store_error;
use super::pool::StatementPool;
use super::schema_name::SchemaName;
use super::statement::liveness as statement;

/// Rows a pass at most, whatever was asked for.
const MAX_ROWS: u32 = 1_000;
/// Rows of the first pass, right behind the sweep: as many as the engine asks for in those that follow, so that no claim waits longer.
const FIRST_PASS: u32 = 250;

/// [`SweepStore`] on PostgreSQL. Needs no session state: it works through a transaction-mode pooler.
pub(crate) struct PgSweepStore {
    sweep: String,
    release_pass: String,
    pool: Arc<StatementPool>,
}

impl PgSweepStore {
    /// On sessions of this pool.
    pub(crate) fn new(schema: &SchemaName, pool: Arc<StatementPool>) -> Self {
        Self { sweep: statement::sweep(schema), release_pass: statement::release_pass(schema), pool }
    }

    async fn sweep_now(&self, me: InstanceId) -> Result<Option<Swept>, StoreError> {
        let rows = self.pool.query(me, "sweep", &self.sweep, &[(&me.0, Type::UUID)]).await?;
        let (evicted, unfinished): (Option<Vec<Uuid>>, bool) = pair(&rows, me)?;
        let Some(evicted) = evicted else { return Ok(None) };
        let evicted = evicted.into_iter().map(InstanceId).collect();
        let mut swept = Swept { evicted, released: 0, unfinished };
        if unfinished {
            // What was evicted must be told even if this fails; the caller goes on where it stopped.
            match self.release_now(me, FIRST_PASS).await {
                Ok((released, unfinished)) => (swept.released, swept.unfinished) = (released, unfinished),
                Err(error) => debug!(%error, "the first pass of a release failed and will be tried again"),
            }
        }
        Ok(Some(swept))
    }

    async fn release_now(&self, me: InstanceId, max_rows: u32) -> Result<(u64, bool), StoreError> {
        let max_rows = max_rows.clamp(1, MAX_ROWS) as i32;
        let rows = self.pool.query(me, "release", &self.release_pass, &[(&max_rows, Type::INT4)]).await?;
        let (released, unfinished): (i32, bool) = pair(&rows, me)?;
        Ok((u64::from(released.unsigned_abs()), unfinished))
    }
}

/// The two columns of the one row there is.
fn pair<'a, T: FromSql<'a>>(rows: &'a [Row], me: InstanceId) -> Result<(T, bool), StoreError> {
    let row = rows.first().ok_or_else(|| StoreError::Other {
        code: "client".to_owned(),
        message: "the answer has no row".to_owned(),
    })?;
    let columns = row.try_get(0).and_then(|first| Ok((first, row.try_get(1)?)));
    columns.map_err(|error| store_error(&error, me))
}

impl SweepStore for PgSweepStore {
    fn sweep(&self, me: InstanceId) -> PortFuture<'_, Option<Swept>> {
        self.sweep_now(me).boxed()
    }

    fn release_pass(&self, max_rows: u32) -> PortFuture<'_, (u64, bool)> {
        // A release is about the rows of others: it is made in nobody's name.
        self.release_now(InstanceId(Uuid::nil()), max_rows).boxed()
    }
}
