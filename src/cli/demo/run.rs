//! One run: relays first, then the storing, while the output is read and checked.
//!
//! The rule: the run always ends. It ends when everything stored was relayed, or when nothing has moved for a while; then it says so
//! and what is missing counts as lost.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use workpump::NewOutbox;

use super::Total;
use super::kill::{Kill, Killed};
use super::ledger::Ledger;
use super::relays::Relays;
use super::report::{Bars, Report};
use super::source::{Draft, stream_id};
use super::tail::Tail;
use crate::cli::CliError;
use crate::cli::enqueue::Refusal;
use crate::cli::lines::{Entry, Source, in_batches};
use crate::cli::store::Store;

/// How often the output, which sends no event, is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Without any progress for so long, the run gives up.
const STALLED_AFTER: Duration = Duration::from_mins(1);
/// The same when an instance died: its leases have to end first.
const TAKEOVER_WITHIN: Duration = Duration::from_mins(6);

/// A run whose instances are up.
pub(super) struct Run {
    url: String,
    schema: String,
    instances: u32,
    relays: Relays,
}

/// What the storing and the watching share; never borrowed across an await.
pub(super) struct Progress {
    pub(super) ledger: Ledger,
    messages: u64,
    pub(super) stored: u64,
    pub(super) stored_bytes: u64,
    pub(super) all_stored: bool,
    refused: u64,
    refusals: Vec<Refusal>,
    began: Instant,
    last_stored: Instant,
    last_processed: Instant,
    pub(super) bars: Bars,
}

impl Run {
    pub(super) async fn start(url: &str, schema: &str, instances: u32) -> Result<Self, CliError> {
        let relays = Relays::start(url, schema, instances).await?;
        tracing::debug!(instances, "instances are up");
        Ok(Self { url: url.to_owned(), schema: schema.to_owned(), instances, relays })
    }

    /// Stores everything, watches it being relayed, and gives the account.
    pub(super) async fn finish(
        mut self,
        source: Box<dyn Source<Draft>>,
        total: Total,
        kill: bool,
    ) -> Result<Report, CliError> {
        let mut tail = Tail::new(self.relays.output()?);
        let mut store = Store::open(&self.url, &self.schema).await?;
        let now = Instant::now();
        let progress = RefCell::new(Progress {
            ledger: Ledger::default(),
            messages: 0,
            stored: 0,
            stored_bytes: 0,
            all_stored: false,
            refused: 0,
            refusals: Vec::new(),
            began: now,
            last_stored: now,
            last_processed: now,
            bars: Bars::new(total),
        });
        let storing = async {
            store_all(in_batches(source), &mut store, &progress).await?;
            progress.borrow_mut().all_stored = true;
            // The watching decides when it is over.
            std::future::pending::<Result<Option<String>, CliError>>().await
        };
        let mut kill = kill.then(|| Kill::new(&self.url, &self.schema, total));
        let watched = tokio::select! {
            failed = storing => failed,
            watched = watch(&mut self.relays, &mut tail, &progress, kill.as_mut()) => watched,
        };
        progress.borrow().bars.clear();
        let mut trouble = watched?;
        // A second delivery may come with the drain; so the drain belongs to what is checked.
        let drained = self.relays.drain().await?;
        let mut progress = progress.into_inner();
        while tail
            .read(|delivery| progress.ledger.deliver(delivery))
            .map_err(CliError::io("read the output"))?
        {}
        let killed = kill.as_ref().and_then(Kill::done);
        if kill.is_some() && killed.is_none() {
            trouble = trouble.or(Some(
                "nobody was killed: no instance held rows in mid-run; try more messages".to_owned(),
            ));
        }
        trouble = trouble.or(drained).or(self.unsettled().await?);
        let false_evictions = self.false_evictions(killed).await?;
        Ok(progress.report(self.instances, killed, false_evictions, trouble))
    }

    /// Evictions of instances that this program did not kill.
    async fn false_evictions(&self, killed: Option<Killed>) -> Result<u64, CliError> {
        let evictions = workpump::evictions(&self.url, &self.schema).await?;
        let wrong =
            evictions.iter().filter(|one| killed.is_none_or(|killed| killed.instance != one.instance_id));
        Ok(wrong.count() as u64)
    }

    /// Everything relayed must be settled, too, or it comes again one day.
    async fn unsettled(&self) -> Result<Option<String>, CliError> {
        let categories = workpump::status(&self.url, &self.schema).await?.categories;
        let left: i64 = categories.iter().map(|category| category.depth() + category.dead_letters).sum();
        Ok((left > 0).then(|| format!("{left} messages were given up or are still there after the drain")))
    }
}

async fn store_all(
    mut batches: mpsc::Receiver<io::Result<Vec<Entry<Draft>>>>,
    store: &mut Store,
    progress: &RefCell<Progress>,
) -> Result<(), CliError> {
    while let Some(batch) = batches.recv().await {
        let batch = batch.map_err(CliError::io("read the input"))?;
        let bytes = batch.iter().map(|entry| entry.bytes as u64).sum();
        let (messages, lines) = progress.borrow_mut().prepare(batch);
        let stored = store.store(&messages).await?;
        let mut progress = progress.borrow_mut();
        for (at, reason) in stored.refused {
            progress.ledger.refused(messages[at].message_id());
            progress.refuse(lines[at], reason);
        }
        progress.stored += stored.new;
        progress.stored_bytes += bytes;
        progress.last_stored = Instant::now();
        progress.bars.stored(bytes, progress.stored);
    }
    Ok(())
}

/// Reads the output until everything is there. `Some` says why it stopped before.
async fn watch(
    relays: &mut Relays,
    tail: &mut Tail,
    progress: &RefCell<Progress>,
    mut kill: Option<&mut Kill>,
) -> Result<Option<String>, CliError> {
    let mut patience = STALLED_AFTER;
    let (mut seen, mut moved) = ((0, 0), Instant::now());
    loop {
        let more = {
            let progress = &mut *progress.borrow_mut();
            let before = progress.ledger.processed();
            let more = tail
                .read(|delivery| progress.ledger.deliver(delivery))
                .map_err(CliError::io("read the output"))?;
            let processed = progress.ledger.processed();
            if processed > before {
                progress.last_processed = Instant::now();
                progress.bars.processed(processed);
            }
            if seen != (progress.stored, processed) {
                (seen, moved) = ((progress.stored, processed), Instant::now());
            }
            for died in relays.ended()?.into_iter().flatten() {
                progress.ledger.died(died);
                patience = TAKEOVER_WITHIN;
            }
            more
        };
        // Before the end is noticed: the last line may be the one that was taken over.
        if let Some(kill) = &mut kill {
            kill.look(relays, progress).await?;
        }
        let done = progress.borrow().is_done();
        let over = match &kill {
            Some(kill) if done => kill.is_over().await?,
            _ => done,
        };
        if over {
            return Ok(None);
        }
        if relays.all_ended() {
            return Ok(Some(format!("all instances ended{}", relays.logs())));
        }
        if moved.elapsed() > patience {
            let (seconds, log) = (patience.as_secs(), relays.logs());
            return Ok(Some(format!("nothing was stored or relayed for {seconds} s{log}")));
        }
        if more { tokio::task::yield_now().await } else { tokio::time::sleep(LOOK_EVERY).await }
    }
}

impl Progress {
    /// Everything was stored and relayed.
    fn is_done(&self) -> bool {
        self.all_stored && self.ledger.outstanding() == 0
    }

    /// Makes messages of a batch and enters them in the ledger. The second list holds their lines.
    fn prepare(&mut self, batch: Vec<Entry<Draft>>) -> (Vec<NewOutbox>, Vec<u64>) {
        let (mut messages, mut lines) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        for Entry { line, value, .. } in batch {
            self.messages += 1;
            match value {
                Ok(draft) => {
                    messages.push(self.message(line, &draft));
                    lines.push(line);
                }
                Err(reason) => self.refuse(line, reason),
            }
        }
        (messages, lines)
    }

    fn message(&mut self, line: u64, draft: &Draft) -> NewOutbox {
        let stream = draft.stream_key.as_deref().map(stream_id);
        let position = stream.map(|stream| self.ledger.next_position(stream));
        let metadata =
            serde_json::json!({ "stream_key": draft.stream_key, "position": position, "line": line });
        let mut message = NewOutbox::new(draft.message_type, &draft.payload).metadata(&metadata);
        if let Some(stream) = stream {
            message = message.stream(stream);
        }
        self.ledger.expect(message.message_id(), stream, position.unwrap_or(0));
        message
    }

    fn refuse(&mut self, line: u64, reason: String) {
        self.bars.say(&format!("line {line} refused: {reason}"));
        self.refused += 1;
        if self.refusals.len() < crate::cli::enqueue::LISTED {
            self.refusals.push(Refusal { line, reason });
        }
    }

    fn report(
        mut self,
        instances: u32,
        killed: Option<Killed>,
        false_evictions: u64,
        trouble: Option<String>,
    ) -> Report {
        self.refusals.sort_by_key(|refusal| refusal.line);
        Report {
            messages: self.messages,
            instances,
            tally: self.ledger.tally(),
            shares: self.ledger.by_instance(),
            refused: self.refused,
            refusals: self.refusals,
            enqueueing: self.last_stored - self.began,
            processing: self.last_processed - self.began,
            killed,
            false_evictions,
            trouble,
        }
    }
}
