//! `--kill`: one instance dies in mid-run, by `kill -9`, and the others take its rows over.
//!
//! The rule: the busiest one, at a moment at which it holds rows; otherwise there would be nothing to take over. To be sure of that, the
//! lock on the output is taken first: whoever has claimed rows then waits with them in hand. The failure this prevents: a demo that kills
//! an idle instance and calls that a takeover, or that never finds one at work.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::Total;
use super::relays::Relays;
use super::run::Progress;
use crate::cli::CliError;

/// How long the output is held back for an instance with rows to be found, and for how much of that it has to be the busiest.
const HOLD_BACK: Duration = Duration::from_secs(5);
const FOR_THE_BUSIEST: Duration = Duration::from_secs(1);

/// How often the instances, which tell nobody what they hold, are looked at meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(10);

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
        let Some((busiest, _)) = self.victim(relays, &progress.borrow()) else { return Ok(()) };
        let output = relays.output()?;
        // Not here: a writer may hold it for a moment, and everything else of the run goes on meanwhile.
        let locked = tokio::task::spawn_blocking(move || output.lock().map(|()| output)).await;
        let locked = locked.map_err(io::Error::other).flatten().map_err(CliError::io("lock the output"))?;
        let found = self.find(relays, busiest).await?;
        if let Some((victim, held)) = found {
            let mut progress = progress.borrow_mut();
            // Before the kill: nothing of what follows may be read as a second delivery without a cause.
            progress.ledger.kill(victim);
            relays.kill(victim);
            self.done = Some(Killed { instance: victim, held, at: Instant::now(), takeover: None });
            let lines = progress.ledger.by_instance().into_iter().find(|(instance, _)| *instance == victim);
            progress.bars.say(&format!(
                "kill -9 of instance {victim}: it has relayed {} of {} lines so far and holds {held} rows",
                lines.map_or(0, |(_, lines)| lines),
                progress.ledger.processed()
            ));
        }
        drop(locked);
        Ok(())
    }

    /// An instance that holds rows, and how many: the busiest, or after a while the one that holds most.
    async fn find(&self, relays: &Relays, busiest: Uuid) -> Result<Option<(Uuid, i64)>, CliError> {
        let began = Instant::now();
        while began.elapsed() < HOLD_BACK {
            let status = workpump::status(&self.url, &self.schema).await?;
            let members = status.instances.iter().map(|member| (member.instance_id, member.leases));
            let holders = members.filter(|(instance, held)| *held > 0 && relays.is_running(*instance));
            let holders: Vec<_> = holders.collect();
            let found = holders.iter().find(|(instance, _)| *instance == busiest);
            let most = holders.iter().max_by_key(|(_, held)| *held);
            if let Some(found) = found.or(most.filter(|_| began.elapsed() > FOR_THE_BUSIEST)) {
                return Ok(Some(*found));
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(None)
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
