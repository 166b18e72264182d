//! What the engine needs from a database to know that news reaches it.
//!
//! The rule: a proof takes the way that producers take. The failure this prevents: a listener that hears its own ring on its own session,
//! and nobody else's, because producers are in another database or behind something that swallows notifications.

use super::PortFuture;

/// The way by which producers ring: through the database URL and its pool.
pub trait ProducersRoute: Send + Sync + 'static {
    /// Rings a channel: one statement, committed when it is answered. May be dropped at any time; then it may or may not have rung.
    fn ring(&self, channel: String, payload: String) -> PortFuture<'_, ()>;
}
