//! Batches into the outbox, in order, without letting one bad message take its neighbours along.
//!
//! The rule: a batch is one transaction; what the library can tell is refused before it, and if the database refuses a value in it, the
//! batch is halved until the message at fault stands alone, and only that one is refused. Halves go in order, so a stream's messages
//! keep theirs.

use std::collections::HashSet;
use std::ops::Range;

use tokio_postgres::Client;
use workpump::{EnqueueError, InvalidMessage, NewOutbox, Producer};

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
        let producer = Producer::new(schema).map_err(workpump::Error::from)?;
        // So that a schema without tables is reported as that, and not as an unknown relation of the first batch.
        let client = workpump::connect(url).await?;
        workpump::check_schema(&client, schema).await?;
        Ok(Self { client, producer })
    }

    /// Stores what can be stored. An error means that the database cannot be used; a part of the batch may be stored then.
    pub(super) async fn store(&mut self, batch: &[NewOutbox]) -> Result<Stored, CliError> {
        let mut stored = Stored::default();
        let (mut places, mut messages, mut ids) = (Vec::new(), Vec::new(), HashSet::new());
        for (place, message) in batch.iter().enumerate() {
            let checked = self.producer.check_outbox(message).and_then(|()| {
                if ids.insert(message.message_id()) { Ok(()) } else { Err(InvalidMessage::Repeated) }
            });
            match checked {
                Ok(()) => {
                    places.push(place);
                    messages.push(message.clone());
                }
                Err(reason) => stored.refused.push((place, reason.to_string())),
            }
        }
        let mut left: Vec<_> = std::iter::once(0..messages.len()).collect();
        while let Some(range) = left.pop() {
            match self.store_at_once(&messages[range.clone()]).await {
                Ok((new, existing)) => {
                    stored.new += new;
                    stored.existing += existing;
                }
                Err(CliError::Enqueue(e)) if is_about_a_value(&e) => {
                    if range.len() == 1 {
                        stored.refused.push((places[range.start], e.to_string()));
                    } else {
                        let (first, second) = halves(range);
                        left.extend([second, first]);
                    }
                }
                Err(e) => return Err(e),
            }
        }
        stored.refused.sort_unstable_by_key(|(place, _)| *place);
        Ok(stored)
    }

    async fn store_at_once(&mut self, batch: &[NewOutbox]) -> Result<(u64, u64), CliError> {
        if batch.is_empty() {
            return Ok((0, 0));
        }
        let transaction = self.client.transaction().await?;
        let enqueued = self.producer.outbox(&transaction, batch).await?;
        transaction.commit().await?;
        let new = enqueued.new_messages();
        Ok((new as u64, (enqueued.stored.len() - new) as u64))
    }
}

fn halves(range: Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = range.start + range.len() / 2;
    (range.start..middle, middle..range.end)
}

/// Whether a message is at fault, and not the database, the connection or the rights: data exceptions, violated constraints, and
/// limits of the server that a value exceeds.
fn is_about_a_value(error: &EnqueueError) -> bool {
    match error {
        EnqueueError::Invalid { .. } => true,
        EnqueueError::Database { code, .. } => ["22", "23", "54"].iter().any(|class| code.starts_with(class)),
        _ => false,
    }
}
