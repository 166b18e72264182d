//! What the engine needs from a database to be woken when work arrives.
//!
//! The rule: whoever sleeps holds its arm lock, and whoever holds it is rung; a producer that found it free has kept the sleeper awake
//! until its rows are visible. The failure this prevents: a row that is stored in the moment in which its taker falls asleep.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::PortFuture;
use crate::instance::InstanceId;

/// The doorbell of an instance. Its lock belongs to the session that claims, so that both end together.
pub trait Doorbell: Send + Sync + 'static {
    /// Takes the arm lock, waiting this long for producers that found it free and have not ended yet; in whole milliseconds, at least one.
    /// `None`: one of them is still at work. Whoever holds it already gets it again at once, and counts as `mode` from then on.
    ///
    /// [`StoreError::NotDirect`](super::StoreError::NotDirect): the session leads through a pooler, and its locks are not its own.
    fn arm(&self, instance: InstanceId, wait: Duration, mode: ArmMode) -> PortFuture<'_, Option<Armed>>;

    /// Gives the arm lock back, before any call made later. Without the lock nothing is asked of the database.
    fn disarm(&self, instance: InstanceId) -> PortFuture<'_, ()>;

    /// Rings, for each category that `instance` declared, one peer that runs it too and sleeps idle. False: nobody does, so whoever falls
    /// asleep from now on looks once more first.
    fn pass_ring(&self, instance: InstanceId) -> PortFuture<'_, bool>;
}

/// Why an instance wants to be rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArmMode {
    /// It has nothing to do and takes what comes.
    Idle,
    /// It can take nothing, and passes each ring on. It is never passed one, so no two of them ring each other for ever.
    Full,
}

/// The arm lock is held.
pub struct Armed {
    ended: BoxFuture<'static, ()>,
}

impl Armed {
    /// Held until `ended` resolves: the session that holds the lock has ended, and nobody rings any more.
    pub fn until(ended: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { ended: Box::pin(ended) }
    }

    /// Waits for the end of the session that holds the lock.
    pub async fn ended(self) {
        self.ended.await;
    }
}

impl fmt::Debug for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Armed").finish_non_exhaustive()
    }
}
