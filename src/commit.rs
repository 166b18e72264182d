//! What a transaction brought, and its commit.
//!
//! The rule: whoever is told "committed" has committed, and whoever commits work that this process runs does not wait for a poll. The
//! failures this prevents: a transaction that the server rolled back while the driver said "done", because one of its statements had
//! failed, and a message that waits beside an idle pump for the doorbell to come round through the database.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use futures_util::TryStreamExt;
use futures_util::future::join;
use tokio_postgres::Transaction;
use tokio_postgres::error::{Severity, SqlState};
use uuid::Uuid;
use workpump_actors::work::Category;

use crate::pg::fault::describe;
use crate::pg::statement::enqueue::STILL_IN_ORDER;

/// What became of one message of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Its id.
    pub message_id: Uuid,
    /// Where it was stored. The same id in two categories is two messages.
    pub category: Category,
    /// False: a message of this id was stored before, and nothing was changed.
    pub is_new: bool,
}

/// The answer to a batch, in its order. It takes effect when the caller's transaction commits.
///
/// The answers of several batches add up, for [`WorkPump::commit`](crate::WorkPump::commit): with `+`, `+=`, `extend`, or `sum` and
/// `collect` of an iterator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "whether a message was new is only known here"]
pub struct Enqueued {
    /// One entry a message.
    pub stored: Vec<Stored>,
}

impl Enqueued {
    /// How many messages were new.
    pub fn new_messages(&self) -> usize {
        self.stored.iter().filter(|stored| stored.is_new).count()
    }

    /// Whether it has a new message in one of these categories.
    pub(crate) fn brings_any_of(&self, categories: &[Category]) -> bool {
        self.stored.iter().any(|stored| stored.is_new && categories.contains(&stored.category))
    }
}

impl AddAssign for Enqueued {
    fn add_assign(&mut self, other: Self) {
        self.stored.extend(other.stored);
    }
}

impl Add for Enqueued {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl Extend<Self> for Enqueued {
    fn extend<I: IntoIterator<Item = Self>>(&mut self, batches: I) {
        for batch in batches {
            *self += batch;
        }
    }
}

impl FromIterator<Self> for Enqueued {
    fn from_iter<I: IntoIterator<Item = Self>>(batches: I) -> Self {
        let mut all = Self::default();
        all.extend(batches);
        all
    }
}

impl Sum for Enqueued {
    fn sum<I: Iterator<Item = Self>>(batches: I) -> Self {
        batches.collect()
    }
}

/// Why [`WorkPump::commit`](crate::WorkPump::commit) could not say that the transaction was committed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// Nothing of it was written: a deferred constraint, a serialization failure, an earlier statement that had failed (`25P02`). Do the
    /// whole transaction again, if the code says that this can help.
    #[error("the transaction was not committed ({code}): {message}")]
    RolledBack {
        /// The SQLSTATE, or `client` when the session had ended before the commit could be sent.
        code: String,
        /// What the server said.
        message: String,
        /// The driver's error.
        #[source]
        source: tokio_postgres::Error,
    },
    /// The commit was sent and its answer did not arrive. Look whether the writes are there before you do them again; messages stored
    /// again under the same id change nothing.
    #[error("it is not known whether the transaction was committed, look before you repeat it: {message}")]
    Unknown {
        /// What was seen instead of an answer.
        message: String,
        /// The driver's error.
        #[source]
        source: tokio_postgres::Error,
    },
}

impl CommitError {
    fn rolled_back(source: tokio_postgres::Error) -> Self {
        let code = source.code().map_or_else(|| "client".to_owned(), |code| code.code().to_owned());
        Self::RolledBack { code, message: describe(&source), source }
    }

    fn unknown(source: tokio_postgres::Error) -> Self {
        Self::Unknown { message: describe(&source), source }
    }
}

/// Commits, in one round trip.
///
/// `COMMIT` of a transaction in which a statement has failed rolls it back, says so in a word that the driver does not read, and is no
/// error. So a statement that fails in such a transaction travels before it.
pub(crate) async fn commit(transaction: Transaction<'_>) -> Result<(), CommitError> {
    // Sent when this returns; the answer comes with that of the commit.
    let probe =
        transaction.client().simple_query_raw(STILL_IN_ORDER).await.map_err(CommitError::rolled_back)?;
    let (probed, committed) = join(probe.try_for_each(|_| async { Ok(()) }), transaction.commit()).await;
    match (probed, committed) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(error), _) | (_, Err(error)) if is_the_end_of_the_transaction(&error) => {
            Err(CommitError::rolled_back(error))
        }
        (_, Err(error)) | (Err(error), Ok(())) => Err(CommitError::unknown(error)),
    }
}

/// Whether the server has told that it gave the transaction up, and goes on serving the session. A session that it ends may have
/// committed before: a shutdown while the commit waits for a standby, for example.
fn is_the_end_of_the_transaction(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|server| {
        let code = server.code();
        server.parsed_severity() == Some(Severity::Error)
            && !code.code().starts_with("08")
            && *code != SqlState::T_R_STATEMENT_COMPLETION_UNKNOWN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(category: Category, is_new: &[bool]) -> Enqueued {
        let stored = is_new.iter().map(|&is_new| Stored { message_id: Uuid::now_v7(), category, is_new });
        Enqueued { stored: stored.collect() }
    }

    #[test]
    fn batches_add_up_in_their_order_whichever_way() {
        let (one, two) = (batch(Category::Outbox, &[true, false]), batch(Category::Inbox, &[true]));
        let all: Vec<Stored> = one.stored.iter().chain(&two.stored).copied().collect();
        assert_eq!((one.clone() + two.clone()).stored, all);
        assert_eq!([one.clone(), two.clone()].into_iter().sum::<Enqueued>().stored, all);
        assert_eq!([one.clone(), two.clone()].into_iter().collect::<Enqueued>().stored, all);
        let mut extended = one;
        extended.extend([two, Enqueued::default()]);
        assert_eq!((extended.new_messages(), extended.stored), (2, all));
    }

    #[test]
    fn only_new_messages_of_the_right_category_are_news() {
        let known = batch(Category::Inbox, &[false]);
        assert!(!known.brings_any_of(&Category::ALL));
        let both = known + batch(Category::Outbox, &[false, true]);
        assert!(both.brings_any_of(&[Category::Outbox]) && !both.brings_any_of(&[Category::Inbox]));
        assert!(!both.brings_any_of(&[]) && !Enqueued::default().brings_any_of(&Category::ALL));
    }
}
