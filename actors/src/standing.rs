//! Where this instance stands, for every incarnation of every actor.
//!
//! The rule: events are sent, state is read. What an actor must know although it was not there when it was told stands here; messages
//! only say that it is time to look. The failure this prevents: an actor that was started again after a crash and claims, starts or
//! writes while the instance is fenced, or rises again after the instance has left.
//!
//! Who writes: the warden fences, unfences and notes an eviction before it tells anyone, so that a receiver that dies of the message
//! leaves nothing unsaid; so does the keeper of the direct session with the gate. Everything else is written by the actor that hears it,
//! as the first thing it does. What has no way back (an eviction, a drain, a departure) anyone may note.

mod gate;
mod trust;

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::instance::AliveLock;
use crate::lock;
use crate::policy::trust::TrustRule;

use gate::GateBook;
pub use gate::GateKeeper;
use trust::TrustBook;
pub use trust::{Trust, Untrusted};

/// What is known about one life of this instance. A fresh one is fenced and free to work.
#[derive(Debug, Default)]
pub struct Standing {
    wishes: Arc<Wishes>,
    trust: TrustBook,
    member: Flag,
    evicted: watch::Sender<bool>,
    eviction_told: Flag,
    registered: Flag,
    leaving: Flag,
    deregistered: Flag,
    recover: Flag,
    had_claimer: Flag,
    gate: GateBook,
    alive_lock: AtomicU8,
    alive_lock_since: Mutex<Option<Instant>>,
}

/// What people want of it, whatever its id is: kept from life to life.
#[derive(Debug, Default)]
struct Wishes {
    paused: Flag,
    draining: Flag,
}

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Flag {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Returns what it was before.
    fn put(&self, value: bool) -> bool {
        self.0.swap(value, Ordering::AcqRel)
    }
}

/// One life after another: each id has a standing of its own, so that nothing has to be reset.
impl Standing {
    /// For a fresh instance whose peers wait for so long.
    pub fn new(rule: TrustRule) -> Self {
        Self { trust: TrustBook::new(rule), ..Self::default() }
    }

    /// That of the next life under a fresh id. What was wished for goes on.
    #[must_use]
    pub fn successor(&self) -> Self {
        let (wishes, gate) = (Arc::clone(&self.wishes), self.gate.successor());
        Self { wishes, gate, ..Self::new(self.trust_rule()) }
    }
}

/// Membership: written by the warden.
impl Standing {
    /// Its leases may not be its own: nothing may be claimed, started or written.
    pub fn fence(&self) {
        self.member.put(false);
    }

    /// It is a member, and its leases are its own.
    pub fn unfence(&self) {
        self.member.put(true);
    }

    /// Whether it is fenced: not a member yet, or not sure to be one.
    pub fn is_fenced(&self) -> bool {
        !self.member.is_set()
    }

    /// Its id is burnt. There is no way back.
    pub fn evict(&self) {
        self.evicted.send_replace(true);
    }

    /// Whether it was evicted.
    pub fn is_evicted(&self) -> bool {
        *self.evicted.borrow()
    }

    /// Waits until it is evicted.
    async fn evicted(&self) {
        // The sender lives as long as this.
        let _ = self.evicted.subscribe().wait_for(|evicted| *evicted).await;
    }

    /// Whether everyone still has to be told of the eviction. True once.
    pub fn must_tell_eviction(&self) -> bool {
        !self.eviction_told.put(true)
    }
}

/// What it is told to do.
impl Standing {
    /// Claims nothing until [`Standing::resume`].
    pub fn pause(&self) {
        self.wishes.paused.put(true);
    }

    /// Claims again.
    pub fn resume(&self) {
        self.wishes.paused.put(false);
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.wishes.paused.is_set()
    }

    /// A drain has begun: claims and starts nothing any more. There is no way back.
    pub fn drain(&self) {
        self.wishes.draining.put(true);
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.wishes.draining.is_set()
    }

    /// Whether nothing new may ever be taken in hand again.
    pub fn is_over(&self) -> bool {
        self.is_evicted() || self.is_draining()
    }

    /// Whether rows may be claimed now, as far as the instance goes.
    pub fn may_claim(&self) -> bool {
        !self.is_fenced() && !self.is_paused() && !self.is_over()
    }
}

/// Registering and leaving: written by whoever beats.
impl Standing {
    /// A beat was accepted: there is something to leave.
    pub fn register(&self) {
        self.registered.put(true);
    }

    /// Whether a beat was ever accepted.
    pub fn is_registered(&self) -> bool {
        self.registered.is_set()
    }

    /// It leaves: from now on it must never beat again.
    pub fn leave(&self) {
        self.leaving.put(true);
    }

    /// Whether it leaves or has left.
    pub fn has_left(&self) -> bool {
        self.leaving.is_set()
    }

    /// The store has confirmed that it left.
    pub fn deregister(&self) {
        self.deregistered.put(true);
    }

    /// Whether the store has confirmed that it left.
    pub fn is_deregistered(&self) -> bool {
        self.deregistered.is_set()
    }
}

/// What it has heard of its alive-lock.
impl Standing {
    /// Whether it holds its alive lock. Returns what was known before.
    pub fn set_alive_lock(&self, held: AliveLock) -> AliveLock {
        let mut since = lock(&self.alive_lock_since);
        let before = lock_of(self.alive_lock.swap(held as u8, Ordering::AcqRel));
        if held != AliveLock::Held {
            *since = None;
        } else if before != AliveLock::Held {
            *since = Some(Instant::now());
        }
        before
    }

    /// How long it has held its alive lock without a break; `None` while it does not.
    pub fn alive_lock_held_for(&self) -> Option<Duration> {
        lock(&self.alive_lock_since).map(|since| since.elapsed())
    }

    /// Whether it holds its alive lock.
    pub fn alive_lock(&self) -> AliveLock {
        lock_of(self.alive_lock.load(Ordering::Acquire))
    }
}

/// What may have been lost.
impl Standing {
    /// Rows may be leased to this instance that nobody here holds: they are handed back before the next claim. To be said after the
    /// crash of an actor that holds rows or passes them on, and followed by a wake of the claimer.
    pub fn recover(&self) {
        self.recover.put(true);
    }

    /// Whether there may be such rows.
    pub fn must_recover(&self) -> bool {
        self.recover.is_set()
    }

    /// Takes the task on. To be asked before one looks at what is held: what is lost later is said anew.
    pub(crate) fn take_recovery(&self) -> bool {
        self.recover.put(false)
    }

    /// Whether there was a claimer before this one, which may have died of a claim. Asked by each, once.
    pub(crate) fn succeeds_claimer(&self) -> bool {
        self.had_claimer.put(true)
    }
}

fn lock_of(code: u8) -> AliveLock {
    [AliveLock::NoSource, AliveLock::Held, AliveLock::NotHeld]
        .into_iter()
        .find(|lock| *lock as u8 == code)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::Gate;

    #[test]
    fn a_fresh_instance_is_fenced_and_nothing_else() {
        let standing = Standing::default();
        assert!(standing.is_fenced() && !standing.is_over() && !standing.is_paused());
        assert!(!standing.may_claim() && !standing.must_recover() && !standing.has_left());
        standing.unfence();
        assert!(standing.may_claim());
    }

    #[test]
    fn each_of_fence_pause_drain_and_eviction_stops_claims() {
        for stop in [Standing::fence, Standing::pause, Standing::drain, Standing::evict] {
            let standing = Standing::default();
            standing.unfence();
            stop(&standing);
            assert!(!standing.may_claim());
        }
    }

    #[test]
    fn the_lock_is_read_as_it_was_written() {
        let standing = Standing::default();
        let mut lock_before = AliveLock::default();
        for lock in [AliveLock::Held, AliveLock::NotHeld, AliveLock::NoSource] {
            assert_eq!(standing.set_alive_lock(lock), lock_before);
            assert_eq!(standing.alive_lock(), lock);
            lock_before = lock;
        }
    }

    #[test]
    fn the_next_life_knows_what_was_wished_for_and_nothing_else() {
        let first = Standing::default();
        first.unfence();
        first.register();
        first.set_alive_lock(AliveLock::Held);
        first.set_gate(first.keep_gate(), Gate::Available, None);
        first.evict();
        let second = first.successor();
        assert!(second.is_fenced() && !second.is_evicted() && !second.is_registered());
        assert_eq!((second.alive_lock(), second.gate()), (AliveLock::NoSource, Gate::Available));
        first.pause();
        second.drain();
        assert!(second.is_paused() && first.is_draining());
    }

    #[test]
    fn a_recovery_is_taken_once_and_an_eviction_told_once() {
        let standing = Standing::default();
        standing.recover();
        assert!(standing.take_recovery() && !standing.take_recovery());
        assert!(standing.must_tell_eviction() && !standing.must_tell_eviction());
        assert!(!standing.succeeds_claimer() && standing.succeeds_claimer());
    }
}
