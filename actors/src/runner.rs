//! What the engine needs from user code: bytes in, verdict out. No types, no database.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::instance::InstanceId;
use crate::standing::Trust;
use crate::work::{ClaimedWork, FailureReason};

/// One attempt at one row.
#[derive(Clone, Debug)]
pub struct Job {
    /// The row and its body.
    pub work: ClaimedWork,
    /// The instance that leases it.
    pub instance: InstanceId,
    /// Fires when the lease is about to end or is known to be lost: stop, whatever you did is fenced from now on.
    pub cancel: CancellationToken,
    /// Proves that the instance is still a member, when something is about to be done that the database cannot undo.
    pub trust: Trust,
}

/// Why an attempt failed.
///
/// Any error converts into [`Failure::Retry`] without a pause of its own, so `?` does what one expects.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Try again, after `after` or by the retry policy.
    Retry {
        /// Not before this much time has passed; `None` = the policy's backoff.
        after: Option<Duration>,
        /// Why.
        reason: FailureReason,
        /// What went wrong, for people.
        error: String,
    },
    /// Never try again: dead-letter the row now.
    Permanent {
        /// Why.
        reason: FailureReason,
        /// What went wrong, for people.
        error: String,
    },
}

impl Failure {
    /// Try again by the retry policy.
    pub fn retry(error: impl Into<String>) -> Self {
        Self::Retry { after: None, reason: FailureReason::Unknown, error: error.into() }
    }

    /// Try again after a pause of your choice. Counts as an attempt.
    pub fn retry_after(after: Duration, error: impl Into<String>) -> Self {
        Self::Retry { after: Some(after), reason: FailureReason::Unknown, error: error.into() }
    }

    /// Give the row up at once.
    pub fn permanent(error: impl Into<String>) -> Self {
        Self::Permanent { reason: FailureReason::Validation, error: error.into() }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        Self::retry(text)
    }
}

/// Runs claimed rows of one category.
pub trait Runner: Send + Sync + 'static {
    /// How many rows one call of [`Runner::run_batch`] takes at most. 1 (the default) means: every row by itself, through
    /// [`Runner::run`].
    fn max_batch(&self) -> usize {
        1
    }

    /// Runs one row. A panic counts as a failed attempt.
    ///
    /// A future that still waits when the lease has ended is dropped: its result would be fenced, and the row is run again. Code that
    /// blocks its thread cannot be dropped; it holds its thread, its permit and its stream until it returns.
    fn run(&self, job: Job) -> BoxFuture<'static, Result<(), Failure>>;

    /// Runs many rows, in the order given inside each order key, and answers for each, in the same order.
    ///
    /// Called only when [`Runner::max_batch`] is greater than 1. A row that follows a failed row of its own order key counts as
    /// not run, whatever is answered for it. A missing answer counts as a failed attempt.
    fn run_batch(&self, jobs: Vec<Job>) -> BoxFuture<'static, Vec<Result<(), Failure>>> {
        let runs: Vec<_> = jobs.into_iter().map(|job| (job.work.order_key(), self.run(job))).collect();
        Box::pin(async move {
            let mut answers = Vec::with_capacity(runs.len());
            let mut stopped = HashSet::new();
            for (key, run) in runs {
                if key.as_ref().is_some_and(|key| stopped.contains(key)) {
                    answers.push(Err(Failure::retry("not run: an earlier row of the same stream failed")));
                    continue;
                }
                let answer = run.await;
                if let (Err(_), Some(key)) = (&answer, key) {
                    stopped.insert(key);
                }
                answers.push(answer);
            }
            answers
        })
    }
}
