//! Peers in memory: they die when the test says so, and their rows come back pass by pass.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::instance::InstanceId;
use crate::lock;
use crate::port::{
    DatabaseTime, DeathWatch, PortFuture, StoreError, Suspect, SuspectVerdict, SweepStore, Swept,
};

/// A watch that names whom the test lets die.
#[derive(Debug)]
pub struct FakeDeathWatch {
    state: Mutex<Watch>,
    origin: Instant,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Watch {
    deaths: VecDeque<Suspect>,
    suspects: VecDeque<Suspect>,
    verdicts: VecDeque<Result<SuspectVerdict, StoreError>>,
    failures: VecDeque<StoreError>,
    watches: Vec<(Duration, Duration, bool)>,
    judged: Vec<(Duration, Suspect)>,
    delay: Duration,
}

impl FakeDeathWatch {
    /// Everybody lives.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), origin: Instant::now(), changed: Notify::new() })
    }

    /// The database's time: microseconds since this was made.
    pub fn now(&self) -> DatabaseTime {
        DatabaseTime(self.origin.elapsed().as_micros() as i64)
    }

    /// The watched peer loses its lock now: the watch under way, or the next one, names it.
    pub fn die(&self, peer: InstanceId) {
        let suspect = Suspect { peer, since: self.now() };
        lock(&self.state).deaths.push_back(suspect);
        self.changed.notify_waiters();
    }

    /// A member without its lock whom nobody watches: the next watch with a census names it.
    pub fn suspect(&self, peer: InstanceId) {
        let suspect = Suspect { peer, since: self.now() };
        lock(&self.state).suspects.push_back(suspect);
    }

    /// The next verdict that is not `Early`. Without one it is `Evicted`.
    pub fn judge_next(&self, verdict: Result<SuspectVerdict, StoreError>) {
        lock(&self.state).verdicts.push_back(verdict);
    }

    /// From now on the answer to what a verdict has done takes so long.
    pub fn set_delay(&self, delay: Duration) {
        lock(&self.state).delay = delay;
    }

    /// The next watch fails so.
    pub fn fail_next(&self, error: StoreError) {
        lock(&self.state).failures.push_back(error);
        self.changed.notify_waiters();
    }

    /// Every watch that was begun: when, for how long, and whether with a census.
    pub fn watches(&self) -> Vec<(Duration, Duration, bool)> {
        lock(&self.state).watches.clone()
    }

    /// Every verdict that was asked for, and when.
    pub fn judged(&self) -> Vec<(Duration, Suspect)> {
        lock(&self.state).judged.clone()
    }

    async fn watch_now(&self, wait: Duration, census: bool) -> Result<Option<Suspect>, StoreError> {
        lock(&self.state).watches.push((self.origin.elapsed(), wait, census));
        let until = Instant::now() + wait;
        loop {
            let changed = self.changed.notified();
            {
                let mut state = lock(&self.state);
                if let Some(error) = state.failures.pop_front() {
                    return Err(error);
                }
                let found = if census { state.suspects.pop_front() } else { None };
                if let Some(suspect) = found.or_else(|| state.deaths.pop_front()) {
                    return Ok(Some(suspect));
                }
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Ok(None);
            }
        }
    }
}

impl DeathWatch for FakeDeathWatch {
    fn watch(&self, _: InstanceId, wait: Duration, census: bool) -> PortFuture<'_, Option<Suspect>> {
        Box::pin(self.watch_now(wait, census))
    }

    fn evict_suspect(
        &self,
        _: InstanceId,
        suspect: Suspect,
        grace: Duration,
    ) -> PortFuture<'_, SuspectVerdict> {
        Box::pin(async move {
            let early = self.now().0 < suspect.since.0 + grace.as_micros() as i64;
            let (verdict, delay) = {
                let mut state = lock(&self.state);
                state.judged.push((self.origin.elapsed(), suspect));
                if early {
                    return Ok(SuspectVerdict::Early);
                }
                (state.verdicts.pop_front().unwrap_or(Ok(SuspectVerdict::Evicted)), state.delay)
            };
            take_time(delay).await;
            verdict
        })
    }
}

/// A backstop sweep over peers that the test lets go stale.
#[derive(Debug)]
pub struct FakeSweep {
    state: Mutex<Sweep>,
    origin: Instant,
}

#[derive(Debug, Default)]
struct Sweep {
    stale: Vec<InstanceId>,
    rows: u64,
    busy: bool,
    locked: bool,
    delay: Duration,
    failures: VecDeque<StoreError>,
    sweeps: Vec<Duration>,
    passes: Vec<(Duration, u64)>,
}

impl FakeSweep {
    /// Nobody is stale and nothing waits to be released.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), origin: Instant::now() })
    }

    /// The next sweep finds this peer, which leases so many rows.
    pub fn go_stale(&self, peer: InstanceId, rows: u64) {
        let mut state = lock(&self.state);
        state.stale.push(peer);
        state.rows += rows;
    }

    /// An eviction by somebody else left so many rows to hand back.
    pub fn leave_rows(&self, rows: u64) {
        lock(&self.state).rows += rows;
    }

    /// Whether another instance is sweeping.
    pub fn set_busy(&self, busy: bool) {
        lock(&self.state).busy = busy;
    }

    /// Whether somebody has the rows locked: passes bring nothing back.
    pub fn set_locked(&self, locked: bool) {
        lock(&self.state).locked = locked;
    }

    /// From now on the answer to what a sweep has done takes so long.
    pub fn set_delay(&self, delay: Duration) {
        lock(&self.state).delay = delay;
    }

    /// The next call, of either kind, fails so.
    pub fn fail_next(&self, error: StoreError) {
        lock(&self.state).failures.push_back(error);
    }

    /// When sweeps were made.
    pub fn sweeps(&self) -> Vec<Duration> {
        lock(&self.state).sweeps.clone()
    }

    /// When passes were made, those inside sweeps included, and the rows they brought back.
    pub fn passes(&self) -> Vec<(Duration, u64)> {
        lock(&self.state).passes.clone()
    }

    /// Rows that wait to be handed back.
    pub fn rows_left(&self) -> u64 {
        lock(&self.state).rows
    }
}

impl Sweep {
    fn pass(&mut self, at: Duration, max_rows: u32) -> (u64, bool) {
        let released = if self.locked { 0 } else { self.rows.min(max_rows.clamp(1, 1_000).into()) };
        self.rows -= released;
        self.passes.push((at, released));
        (released, self.rows > 0)
    }
}

impl SweepStore for FakeSweep {
    fn sweep(&self, me: InstanceId) -> PortFuture<'_, Option<Swept>> {
        Box::pin(async move {
            let (swept, delay) = {
                let mut state = lock(&self.state);
                let at = self.origin.elapsed();
                state.sweeps.push(at);
                if let Some(error) = state.failures.pop_front() {
                    return Err(error);
                }
                if state.busy {
                    return Ok(None);
                }
                let (own, evicted): (Vec<_>, Vec<_>) = state.stale.drain(..).partition(|peer| *peer == me);
                state.stale = own;
                let (released, unfinished) = if state.rows > 0 { state.pass(at, 1_000) } else { (0, false) };
                (Swept { evicted, released, unfinished }, state.delay)
            };
            take_time(delay).await;
            Ok(Some(swept))
        })
    }

    fn release_pass(&self, max_rows: u32) -> PortFuture<'_, (u64, bool)> {
        Box::pin(async move {
            let mut state = lock(&self.state);
            let at = self.origin.elapsed();
            match state.failures.pop_front() {
                Some(error) => Err(error),
                None => Ok(state.pass(at, max_rows)),
            }
        })
    }
}

/// Even a sleep of no time lets the clock go on.
async fn take_time(delay: Duration) {
    if !delay.is_zero() {
        sleep(delay).await;
    }
}
