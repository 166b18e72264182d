//! What proves this instance alive, and until when it may believe in it.
//!
//! The rule: whoever is about to start a handler or to write asks [`Standing::is_trusted`] at that moment, with the clock; no timer is
//! relied on. The failure this prevents: a process that was stopped for a minute and whose first act, before any timer rings, is a write
//! under leases that are somebody else's by now.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::watch;
use tokio::time::timeout;

use super::{Flag, Standing};
use crate::actor::now;
use crate::lock;
use crate::message::BeatNow;
use crate::policy::trust::{Evidence, SentBeat, TrustRule};

/// How long [`Trust::prove`] waits for its proof.
const PATIENCE: Duration = Duration::from_secs(10);

/// The evidence and what follows from it.
#[derive(Debug, Default)]
pub(super) struct TrustBook {
    rule: TrustRule,
    evidence: Mutex<Evidence>,
    /// Instants below are counted from here.
    origin: OnceLock<Instant>,
    /// Nanoseconds until trust ends. Zero: nothing was judged yet.
    until: AtomicU64,
    /// Somebody was held back because trust had ended.
    doubted: Flag,
    /// Numbers the sessions that held the alive-lock.
    session: AtomicU64,
    /// When the last accepted beat was sent.
    beaten: watch::Sender<Option<Instant>>,
}

impl TrustBook {
    pub(super) fn new(rule: TrustRule) -> Self {
        Self { rule, ..Self::default() }
    }

    fn learn(&self, note: impl FnOnce(&mut Evidence)) {
        let mut evidence = lock(&self.evidence);
        note(&mut evidence);
        if let Some(until) = self.rule.until(&evidence) {
            let origin = *self.origin.get_or_init(now);
            let nanos = until.saturating_duration_since(origin).as_nanos() as u64;
            self.until.store(nanos.max(1), Ordering::Release);
        }
    }

    fn until(&self) -> Option<Instant> {
        let nanos = self.until.load(Ordering::Acquire);
        let origin = self.origin.get().filter(|_| nanos > 0)?;
        Some(*origin + Duration::from_nanos(nanos))
    }
}

/// Proofs: beats are noted by whoever beats, pings and sessions by whoever holds the direct session, each before anybody is told.
impl Standing {
    /// A beat goes out.
    pub fn beat_sent(&self, beat: SentBeat) {
        self.trust.learn(|evidence| evidence.sent(beat));
    }

    /// A beat was accepted.
    pub fn beat_accepted(&self, beat: SentBeat) {
        self.trust.learn(|evidence| evidence.accepted(beat));
        self.trust.beaten.send_replace(Some(beat.sent_at));
    }

    /// A ping was answered on the session of this number, which holds the lock.
    pub fn pinged(&self, session: u64, sent_at: Instant) {
        self.trust.learn(|evidence| evidence.pinged(session, sent_at));
    }

    /// Another session holds the alive-lock from now on. Returns its number, never used before.
    pub fn new_lock_session(&self) -> u64 {
        self.trust.session.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The last session that held the alive-lock.
    pub fn lock_session(&self) -> u64 {
        self.trust.session.load(Ordering::Acquire)
    }
}

/// What follows.
impl Standing {
    /// The limits of trust.
    pub fn trust_rule(&self) -> TrustRule {
        self.trust.rule
    }

    /// Until when no peer can have evicted this instance. `None`: no beat was accepted yet.
    pub fn trust_until(&self) -> Option<Instant> {
        self.trust.until()
    }

    /// Whether its leases are its own at this moment, as far as that can be known. An instance that has nothing in hand pings nobody, so
    /// a false is no reason to fence it; it is one to start and write nothing before the next proof. True before the first beat: then it
    /// is fenced anyway.
    pub fn is_trusted(&self, now: Instant) -> bool {
        self.trust.until().is_none_or(|until| now < until)
    }

    /// Somebody was held back: whoever brings the next proof has to tell everyone to look again.
    pub fn doubt(&self) {
        self.trust.doubted.put(true);
    }

    /// Whether somebody was held back.
    pub fn is_doubted(&self) -> bool {
        self.trust.doubted.is_set()
    }

    /// Whether everyone has to be told to look again. True once for each time.
    pub(crate) fn take_doubt(&self) -> bool {
        self.trust.doubted.put(false)
    }
}

/// Why a proof was not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// The lease is about to end, or is lost: somebody else may have the row, or get it any moment.
    #[error("the lease of this row is over or about to end")]
    LeaseOver,
    /// The instance was evicted: the row is somebody else's.
    #[error("this instance was evicted")]
    Evicted,
    /// The database did not confirm the membership in time.
    #[error("the database did not confirm in time that this instance is alive")]
    Unproven,
}

/// For handlers: proves that this instance is a member, now.
#[derive(Clone)]
pub struct Trust {
    standing: Arc<Standing>,
    beat_now: Option<Recipient<BeatNow>>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").field("until", &self.standing.trust_until()).finish_non_exhaustive()
    }
}

impl Trust {
    /// By the beats of whoever gets `beat_now`. `None`: what is known has to do.
    pub fn new(standing: Arc<Standing>, beat_now: Option<Recipient<BeatNow>>) -> Self {
        Self { standing, beat_now }
    }

    /// Until when no peer can have taken this instance for dead.
    pub fn until(&self) -> Option<Instant> {
        self.standing.trust_until()
    }

    pub(crate) fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }

    /// Asks for a beat and waits until one that was sent after this call is accepted; many callers share one. A ping would not do: it
    /// proves the lock, and somebody who was evicted by hand still has that.
    ///
    /// # Errors
    ///
    /// When the instance was evicted, or no beat was accepted in time.
    pub async fn prove(&self) -> Result<(), Untrusted> {
        let asked_at = now();
        if let Some(beat_now) = &self.beat_now {
            let mut beaten = self.standing.trust.beaten.subscribe();
            beat_now.do_send(BeatNow);
            let proof = async move {
                // The sender lives as long as the standing.
                let _ = beaten.wait_for(|sent_at| sent_at.is_some_and(|sent_at| sent_at >= asked_at)).await;
            };
            let proven = timeout(PATIENCE, self.unless_evicted(proof)).await;
            proven.map_err(|_| Untrusted::Unproven)??;
        }
        match () {
            () if self.standing.is_evicted() => Err(Untrusted::Evicted),
            // The answer may have taken longer than the proof is good for.
            () if !self.standing.is_trusted(now()) => Err(Untrusted::Unproven),
            () => Ok(()),
        }
    }

    async fn unless_evicted(&self, proof: impl Future<Output = ()>) -> Result<(), Untrusted> {
        tokio::select! {
            biased;
            () = self.standing.evicted() => Err(Untrusted::Evicted),
            () = proof => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_is_judged_at_the_moment_of_asking() {
        let standing = Standing::default();
        let start = now();
        assert!(standing.is_trusted(start), "nothing was judged yet, and a fresh instance is fenced");
        let beat = SentBeat { sent_at: start, lock: Some(1), interval: Duration::from_mins(1) };
        standing.beat_sent(beat);
        assert_eq!(standing.trust_until(), None);
        standing.beat_accepted(beat);
        assert!(standing.is_trusted(start + Duration::from_millis(3_999)));
        assert!(!standing.is_trusted(start + Duration::from_secs(4)));
        standing.pinged(1, start + Duration::from_mins(1));
        assert_eq!(standing.trust_until(), Some(start + Duration::from_secs(64)));
    }

    #[test]
    fn a_doubt_is_taken_once() {
        let standing = Standing::default();
        standing.doubt();
        assert!(standing.is_doubted() && standing.take_doubt() && !standing.take_doubt());
    }
}
