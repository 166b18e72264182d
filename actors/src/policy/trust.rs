//! How long this instance may believe that its leases are its own.
//!
//! The rule: trust counts from the moment a proof was *sent*, never from its answer, and ends before any peer may act. The failure this
//! prevents: an instance that was taken for dead, goes on, and writes beside its successor.
//!
//! What peers may do depends on what the last beat in the table says. If it declared the alive-lock, they evict as soon as they have seen
//! the lock free for the grace, and after five minutes whatever the lock says; if it did not, when the beat is stale. A beat whose answer
//! has not come may be in the table or not, so both cases have to hold.

use std::time::{Duration, Instant};

/// How long after the last beat pings alone are believed: a minute less than what peers wait, lock or no lock.
const PINGS_CARRY: Duration = Duration::from_mins(4);

/// The least age of a stale beat: what peers take for whoever declares a short interval.
const STALE_CUT_OFF: Duration = Duration::from_secs(30);

/// How long before its beat is stale trust ends.
const STALE_MARGIN: Duration = Duration::from_secs(5);

/// The longest part of the grace that is kept as a margin.
const MOST_MARGIN: Duration = Duration::from_secs(1);

/// The longest pause between two pings.
const MOST_PING_PAUSE: Duration = Duration::from_secs(1);

/// One beat, as peers judge by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentBeat {
    /// When it was sent.
    pub sent_at: Instant,
    /// The session whose alive-lock it declared.
    pub lock: Option<u64>,
    /// The interval it declared.
    pub interval: Duration,
}

/// Everything that is known to prove this instance alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    accepted: Option<SentBeat>,
    /// The first beat after it whose answer has not come, of those that declare a lock and of those that do not.
    open: [Option<SentBeat>; 2],
    /// The session and the send time of the last answered ping.
    ping: Option<(u64, Instant)>,
}

impl Evidence {
    /// A beat goes out. To be said before it is sent.
    pub fn sent(&mut self, beat: SentBeat) {
        self.open[usize::from(beat.lock.is_some())].get_or_insert(beat);
    }

    /// A beat was accepted. Older ones are decided with it: the server gives a beat up before the client does.
    pub fn accepted(&mut self, beat: SentBeat) {
        self.accepted = Some(beat);
        self.open = [None; 2];
    }

    /// A ping was answered on a session that holds the lock.
    pub fn pinged(&mut self, session: u64, sent_at: Instant) {
        let newer = self.ping.is_none_or(|(of, at)| session > of || session == of && sent_at > at);
        if newer {
            self.ping = Some((session, sent_at));
        }
    }
}

/// The limits of trust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustRule {
    grace: Duration,
}

impl Default for TrustRule {
    fn default() -> Self {
        Self::new(Duration::from_secs(5))
    }
}

impl TrustRule {
    /// For this grace: what peers wait between the loss of a lock and an eviction.
    pub fn new(grace: Duration) -> Self {
        Self { grace }
    }

    /// Until when this evidence is good. `None`: no beat was accepted, so there is nothing to trust in.
    pub fn until(&self, evidence: &Evidence) -> Option<Instant> {
        let accepted = self.limit(&evidence.accepted?, evidence.ping);
        let open = evidence.open.iter().flatten().map(|beat| self.limit(beat, evidence.ping));
        Some(open.fold(accepted, Instant::min))
    }

    /// What peers wait between the loss of a lock and an eviction.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// How long one proof of a held lock is good.
    pub fn span(&self) -> Duration {
        self.grace.saturating_sub(MOST_MARGIN.min(self.grace.mul_f64(0.3)))
    }

    /// The pause between two pings while handlers run.
    pub fn ping_pause(&self) -> Duration {
        MOST_PING_PAUSE.min(self.grace / 5)
    }

    /// Until when an instance is safe whose last beat is this one.
    fn limit(&self, beat: &SentBeat, ping: Option<(u64, Instant)>) -> Instant {
        match beat.lock {
            Some(session) => {
                // A ping on a session that no beat has declared proves nothing: the loss of the one before it may have been seen.
                let ping = ping.filter(|(of, _)| *of == session).map(|(_, at)| at);
                let proof = ping.map_or(beat.sent_at, |at| at.max(beat.sent_at));
                (proof + self.span()).min(beat.sent_at + PINGS_CARRY)
            }
            None => beat.sent_at + stale_after(beat.interval).saturating_sub(STALE_MARGIN),
        }
    }
}

/// The age at which peers call a beat stale.
fn stale_after(interval: Duration) -> Duration {
    STALE_CUT_OFF.max(2 * interval + Duration::from_secs(5))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Peers evict whoever did not beat for this long, lock or no lock.
    const DEFINITELY_DEAD: Duration = Duration::from_mins(5);

    /// Some instant: taken from tokio's clock, because the other one is banned.
    fn origin() -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn seconds(value: u64) -> Duration {
        Duration::from_secs(value)
    }

    fn beat(sent_at: Instant, lock: Option<u64>) -> SentBeat {
        SentBeat { sent_at, lock, interval: seconds(if lock.is_some() { 60 } else { 30 }) }
    }

    fn after(evidence: &Evidence, start: Instant) -> u128 {
        TrustRule::default().until(evidence).expect("a beat was accepted").duration_since(start).as_millis()
    }

    #[test]
    fn nothing_is_trusted_before_a_beat_was_accepted() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.pinged(1, start);
        evidence.sent(beat(start, Some(1)));
        assert_eq!(TrustRule::default().until(&evidence), None);
    }

    #[test]
    fn with_a_declared_lock_trust_ends_a_margin_before_the_grace_after_the_last_ping() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.accepted(beat(start, Some(1)));
        assert_eq!(after(&evidence, start), 4_000);
        evidence.pinged(1, start + seconds(10));
        assert_eq!(after(&evidence, start), 14_000);
        evidence.pinged(1, start + seconds(9));
        assert_eq!(after(&evidence, start), 14_000, "an answer that came late takes nothing back");
        assert_eq!(TrustRule::new(seconds(1)).until(&evidence), Some(start + Duration::from_millis(10_700)));
    }

    #[test]
    fn a_ping_on_a_session_that_no_beat_has_declared_proves_nothing() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.accepted(beat(start, Some(1)));
        evidence.pinged(2, start + seconds(3));
        assert_eq!(after(&evidence, start), 4_000);
        evidence.accepted(beat(start + seconds(4), Some(2)));
        evidence.pinged(2, start + seconds(5));
        assert_eq!(after(&evidence, start), 9_000);
        evidence.pinged(1, start + seconds(9));
        assert_eq!(after(&evidence, start), 9_000, "the old session is gone");
    }

    #[test]
    fn without_a_lock_trust_ends_before_the_beat_is_stale() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.accepted(beat(start, None));
        evidence.pinged(1, start + seconds(50));
        assert_eq!(after(&evidence, start), 60_000, "65 s - 5 s, whatever a ping says");
        evidence.accepted(SentBeat { interval: seconds(1), ..beat(start, None) });
        assert_eq!(after(&evidence, start), 25_000, "the cut-off of peers - 5 s");
    }

    #[test]
    fn pings_alone_carry_it_for_four_minutes_at_most() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.accepted(beat(start, Some(1)));
        evidence.pinged(1, start + seconds(239));
        assert_eq!(after(&evidence, start), 240_000);
    }

    #[test]
    fn a_beat_without_an_answer_counts_as_written_and_as_not_written() {
        let (start, mut evidence) = (origin(), Evidence::default());
        evidence.accepted(beat(start, None));
        evidence.sent(beat(start + seconds(10), Some(1)));
        assert_eq!(after(&evidence, start), 14_000, "if it was written, the lock is all that counts");
        evidence.sent(beat(start + seconds(12), Some(1)));
        assert_eq!(after(&evidence, start), 14_000, "the first of them may be the one");
        evidence.accepted(beat(start + seconds(13), None));
        assert_eq!(after(&evidence, start), 73_000);
    }

    #[test]
    fn the_ping_is_five_times_as_fast_as_the_grace_and_at_least_once_a_second() {
        assert_eq!(TrustRule::new(seconds(1)).ping_pause(), Duration::from_millis(200));
        assert_eq!(TrustRule::new(seconds(5)).ping_pause(), seconds(1));
        assert_eq!(TrustRule::new(seconds(60)).ping_pause(), seconds(1));
    }

    /// What a server has: the last beat written, and until when the lock of each session was held.
    #[derive(Clone, Debug)]
    enum Step {
        Beat {
            lock: bool,
            written: bool,
            answered: bool,
        },
        Ping,
        /// The session ends, and the next one takes the lock.
        NewSession,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(lock, written, answered)| Step::Beat {
                lock,
                written: written || answered,
                answered
            }),
            Just(Step::Ping),
            Just(Step::NewSession),
        ]
    }

    proptest! {
        /// Whatever happens, trust ends before the first instant at which a peer could evict.
        #[test]
        fn trust_never_outlasts_the_patience_of_peers(
            steps in prop::collection::vec((step(), 0_u64..40_000), 1..40),
            grace in 1_u64..=60,
        ) {
            let (rule, mut evidence) = (TrustRule::new(seconds(grace)), Evidence::default());
            let mut now = origin();
            let mut session = 1;
            // The last beat in the table: when, with lock or not; and since when a loss of the lock after it may have been seen.
            let mut written: Option<SentBeat> = None;
            let mut lost_since: Option<Instant> = None;
            for (step, pause) in steps {
                now += Duration::from_millis(pause);
                match step {
                    Step::Beat { lock, written: is_written, answered } => {
                        let sent = beat(now, lock.then_some(session));
                        evidence.sent(sent);
                        if is_written {
                            written = Some(sent);
                            lost_since = None;
                        }
                        if answered {
                            evidence.accepted(sent);
                        }
                    }
                    Step::Ping => evidence.pinged(session, now),
                    Step::NewSession => {
                        session += 1;
                        lost_since.get_or_insert(now);
                    }
                }
                let (Some(until), Some(written)) = (rule.until(&evidence), written) else { continue };
                // The earliest eviction if the lock is lost this very moment.
                let lock_path = lost_since.unwrap_or(now) + seconds(grace);
                let earliest = match written.lock {
                    Some(_) => lock_path.min(written.sent_at + DEFINITELY_DEAD),
                    None => written.sent_at + stale_after(written.interval),
                };
                // Trust that is over already claims nothing.
                prop_assert!(until < earliest || until <= now, "trust {:?} after eviction", until - earliest);
            }
        }
    }
}
