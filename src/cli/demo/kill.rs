//! `--kill`: one instance dies in mid-run, by `kill -9`, and the others take its rows over.
//!
//! The rule: the busiest one, at a moment at which it holds rows; otherwise there would be nothing to take over. It is stopped first, so
//! that it still holds them when it is killed, and goes on if it holds none. The failure this prevents: a demo that kills an idle
//! instance and calls that a takeover.

use std::cell::RefCell;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::Total;
use super::relays::Relays;
use super::run::Progress;
use crate::cli::CliError;

/// What is killed, and what came of it.
#[derive(Debug)]
pub(super) struct Kill {
    url: String,
    schema: String,
    total: Total,
    done: Option<Killed>,
}

/// The instance that was killed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Killed {
    pub(super) instance: Uuid,
    /// Rows it held.
    pub(super) held: i64,
    at: Instant,
    /// Until the first of its rows was relayed by somebody else.
    pub(super) takeover: Option<Duration>,
}

impl Kill {
    pub(super) fn new(url: &str, schema: &str, total: Total) -> Self {
        Self { url: url.to_owned(), schema: schema.to_owned(), total, done: None }
    }

    /// Who was killed, if anybody was.
    pub(super) fn done(&self) -> Option<Killed> {
        self.done
    }

    /// Kills when the time has come, and notes the takeover.
    pub(super) async fn look(
        &mut self,
        relays: &Relays,
        progress: &RefCell<Progress>,
    ) -> Result<(), CliError> {
        if let Some(killed) = &mut self.done {
            if killed.takeover.is_none() && progress.borrow().ledger.taken_over() {
                killed.takeover = Some(killed.at.elapsed());
            }
            return Ok(());
        }
        let Some((victim, lines)) = self.victim(relays, &progress.borrow()) else { return Ok(()) };
        relays.pause(victim);
        let status = workpump::status(&self.url, &self.schema).await;
        let held = status.as_ref().map_or(0, |status| {
            let member = status.instances.iter().find(|member| member.instance_id == victim);
            member.map_or(0, |member| member.leases)
        });
        if held == 0 {
            relays.go_on(victim);
            status?;
            return Ok(());
        }
        let mut progress = progress.borrow_mut();
        // Before the kill: nothing of what follows may be read as a second delivery without a cause.
        progress.ledger.kill(victim);
        relays.kill(victim);
        self.done = Some(Killed { instance: victim, held, at: Instant::now(), takeover: None });
        progress.bars.say(&format!(
            "kill -9 of instance {victim}: it has relayed {lines} of {} lines so far and holds {held} rows",
            progress.ledger.processed()
        ));
        Ok(())
    }

    /// Whether everything that the killed one held was taken over and settled: its lines may all be there while its rows are not settled.
    pub(super) async fn is_over(&self) -> Result<bool, CliError> {
        let Some(killed) = &self.done else { return Ok(true) };
        if killed.takeover.is_none() {
            return Ok(false);
        }
        let status = workpump::status(&self.url, &self.schema).await?;
        Ok(status.categories.iter().all(|category| category.depth() == 0))
    }

    /// The busiest that still runs, once a fifth of everything was relayed.
    fn victim(&self, relays: &Relays, progress: &Progress) -> Option<(Uuid, u64)> {
        let (processed, stored) = (progress.ledger.processed(), progress.stored);
        let expected = match self.total {
            _ if progress.all_stored => stored,
            Total::Messages(messages) => messages,
            Total::Bytes(bytes) => stored * bytes / progress.stored_bytes.max(1),
        };
        let mut busiest = progress.ledger.by_instance().into_iter();
        let due = processed > 0 && processed * 5 >= expected;
        due.then(|| busiest.find(|(instance, _)| relays.is_running(*instance))).flatten()
    }
}
