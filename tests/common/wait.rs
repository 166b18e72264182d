//! Waiting for what sends no event.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long anything may take before the test has failed. Never a figure of its own: a busy machine may take long for everything.
pub const PATIENCE: Duration = Duration::from_mins(3);

/// Asks again and again until a condition holds. The deadline only ends a test that has failed.
pub async fn eventually<F: AsyncFnMut() -> bool>(what: &str, mut condition: F) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what} did not come about");
        sleep(Duration::from_millis(2)).await;
    }
}
