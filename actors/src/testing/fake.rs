//! A store in memory, with scripted answers and a log of every call.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::table::{Row, Table};
use crate::instance::InstanceId;
use crate::lock;
use crate::port::{
    ArmMode, Armed, Beat, BeatAnswer, ClaimRequest, Claimed, Doorbell, InstanceStore, PortFuture, Renewal,
    RenewalStore, SettleItem, Settled, StoreError, Verdict, WorkStore,
};
use crate::work::{ClaimEpoch, WorkKey};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// `schema_ready`
    Schema,
    /// `beat`
    Beat,
    /// `deregister`
    Deregister,
    /// `claim`
    Claim,
    /// `settle`
    Settle,
    /// `release_unheld`
    ReleaseUnheld,
    /// `next_claimable_in`
    NextDue,
    /// `renew`
    Renew,
    /// `arm`
    Arm,
    /// `disarm` of one that is armed
    Disarm,
    /// `pass_ring`
    Pass,
}

/// One call, as it was made.
#[derive(Clone, Debug)]
pub enum Call {
    /// The schema was asked for.
    Schema,
    /// A beat.
    Beat(Beat),
    /// The instance left.
    Deregister(InstanceId),
    /// A claim.
    Claim(ClaimRequest),
    /// A flush.
    Settle(Vec<SettleItem>),
    /// A recovery, with what was held.
    ReleaseUnheld(Vec<(WorkKey, ClaimEpoch)>),
    /// The next due time was asked for.
    NextDue,
    /// A flush of renewals, and for how long.
    Renew(Vec<(WorkKey, ClaimEpoch)>, Duration),
    /// The arm lock was asked for, with so much patience.
    Arm(ArmMode, Duration),
    /// The arm lock was given back.
    Disarm,
    /// A ring was passed on.
    Pass,
}

impl Call {
    fn op(&self) -> Op {
        match self {
            Self::Schema => Op::Schema,
            Self::Beat(_) => Op::Beat,
            Self::Deregister(_) => Op::Deregister,
            Self::Claim(_) => Op::Claim,
            Self::Settle(_) => Op::Settle,
            Self::ReleaseUnheld(_) => Op::ReleaseUnheld,
            Self::NextDue => Op::NextDue,
            Self::Renew(..) => Op::Renew,
            Self::Arm(..) => Op::Arm,
            Self::Disarm => Op::Disarm,
            Self::Pass => Op::Pass,
        }
    }
}

/// How one call is answered.
#[derive(Debug)]
pub enum Reply {
    /// From the table, after this much time.
    Slow(Duration),
    /// It happens at once, and the answer takes this much time.
    Late(Duration),
    /// With this error; nothing happens.
    Fail(StoreError),
    /// It happens, but the answer is this error.
    Lose(StoreError),
    /// Never.
    Hang,
}

type Always = Box<dyn Fn(&Call) -> Option<Reply> + Send>;

#[derive(Default)]
struct State {
    table: Table,
    log: Vec<(Duration, Call)>,
    settled: Vec<(WorkKey, ClaimEpoch, Verdict)>,
    script: HashMap<Op, VecDeque<Reply>>,
    always: Option<Always>,
    schema: bool,
    members: HashSet<InstanceId>,
    evicted: HashSet<InstanceId>,
    strict: bool,
    locked: HashSet<WorkKey>,
    armed: Option<ArmMode>,
    /// Ends the session that holds the arm lock when it is dropped.
    session: Option<watch::Sender<()>>,
}

/// Work tables and membership in memory.
pub struct FakeStore {
    state: Mutex<State>,
    origin: Instant,
    called: Notify,
    /// Producers at work that found this instance awake.
    producers: watch::Sender<bool>,
}

impl std::fmt::Debug for FakeStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeStore").finish_non_exhaustive()
    }
}

impl FakeStore {
    /// Empty tables and a usable schema. Anyone may claim.
    pub fn new() -> Arc<Self> {
        let state = State { schema: true, ..State::default() };
        let producers = watch::Sender::new(false);
        Arc::new(Self { state: Mutex::new(state), origin: Instant::now(), called: Notify::new(), producers })
    }

    /// From now on only members may claim and settle.
    pub fn members_only(&self) {
        lock(&self.state).strict = true;
    }

    /// Whether the schema is usable.
    pub fn set_schema(&self, ready: bool) {
        lock(&self.state).schema = ready;
    }

    /// Evicts an instance.
    pub fn evict(&self, instance: InstanceId) {
        let mut state = lock(&self.state);
        state.members.remove(&instance);
        state.evicted.insert(instance);
        state.table.release(instance, &[]);
    }

    /// Whether this instance is a member.
    pub fn is_member(&self, instance: InstanceId) -> bool {
        lock(&self.state).members.contains(&instance)
    }

    /// Stores a row.
    pub fn insert(&self, row: Row) -> WorkKey {
        lock(&self.state).table.insert(row)
    }

    /// Stores many of the same.
    pub fn insert_many(&self, count: usize, row: &Row) -> Vec<WorkKey> {
        (0..count).map(|_| self.insert(row.clone())).collect()
    }

    /// Answers the next unscripted call of this kind so.
    pub fn script(&self, op: Op, reply: Reply) {
        lock(&self.state).script.entry(op).or_default().push_back(reply);
    }

    /// Answers every call that no script waits for by this; `None` from the closure means from the table.
    pub fn always(&self, reply: impl Fn(&Call) -> Option<Reply> + Send + 'static) {
        lock(&self.state).always = Some(Box::new(reply));
    }

    /// Answers from the table again.
    pub fn recover(&self) {
        lock(&self.state).always = None;
    }

    /// When calls of this kind were made, since the store was made.
    pub fn times(&self, op: Op) -> Vec<Duration> {
        lock(&self.state).log.iter().filter(|(_, call)| call.op() == op).map(|(at, _)| *at).collect()
    }

    /// The milliseconds between calls of this kind.
    pub fn gaps(&self, op: Op) -> Vec<u128> {
        self.times(op).windows(2).map(|pair| pair[1].saturating_sub(pair[0]).as_millis()).collect()
    }

    /// How many calls of this kind were made.
    pub fn count(&self, op: Op) -> usize {
        self.times(op).len()
    }

    /// Every call, in order.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.state).log.iter().map(|(_, call)| call.clone()).collect()
    }

    /// Waits until so many calls of this kind were made.
    pub async fn called(&self, op: Op, times: usize) {
        loop {
            let called = self.called.notified();
            if self.count(op) >= times {
                return;
            }
            called.await;
        }
    }

    /// Waits until nothing is left to do.
    pub async fn finished(&self) {
        loop {
            let called = self.called.notified();
            if self.unfinished() == 0 {
                return;
            }
            called.await;
        }
    }

    /// Every write that was applied, in order.
    pub fn settled(&self) -> Vec<(WorkKey, ClaimEpoch, Verdict)> {
        lock(&self.state).settled.clone()
    }

    /// Rows that are neither done nor dead.
    pub fn unfinished(&self) -> usize {
        lock(&self.state).table.unfinished()
    }

    /// Rows that somebody leases.
    pub fn leased(&self) -> usize {
        lock(&self.state).table.leased()
    }

    /// How a row ended, if it has.
    pub fn verdict(&self, key: WorkKey) -> Option<Verdict> {
        lock(&self.state).table.verdict(key)
    }

    /// The attempts charged to a row.
    pub fn attempts(&self, key: WorkKey) -> Option<u32> {
        lock(&self.state).table.attempts(key)
    }

    /// Somebody else claims this row, whoever leases it now, and keeps it for an hour.
    pub fn steal(&self, key: WorkKey) {
        lock(&self.state).table.steal(key);
    }

    /// Whether an outsider has this row locked: its lease can then not be renewed.
    pub fn set_locked(&self, key: WorkKey, locked: bool) {
        let mut state = lock(&self.state);
        if locked {
            state.locked.insert(key)
        } else {
            state.locked.remove(&key)
        };
    }

    /// How much of a row's lease is left, if somebody leases it.
    pub fn lease_left(&self, key: WorkKey) -> Option<Duration> {
        lock(&self.state).table.lease_left(key)
    }

    /// Whether producers are at work that found the instance awake: nobody can arm meanwhile.
    pub fn set_producers_at_work(&self, at_work: bool) {
        self.producers.send_replace(at_work);
    }

    /// The session of claims ends, and with it the arm lock.
    pub fn end_claim_session(&self) {
        let mut state = lock(&self.state);
        (state.armed, state.session) = (None, None);
    }

    /// Whether the arm lock is held, and why.
    pub fn armed(&self) -> Option<ArmMode> {
        lock(&self.state).armed
    }

    /// Notes a call and answers it by script, or by `act`.
    async fn answer<T>(
        &self,
        call: Call,
        act: impl FnOnce(&mut State) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let reply = {
            let mut state = lock(&self.state);
            let scripted = state.script.get_mut(&call.op()).and_then(VecDeque::pop_front);
            let reply = scripted.or_else(|| state.always.as_ref().and_then(|always| always(&call)));
            state.log.push((self.origin.elapsed(), call));
            reply
        };
        self.called.notify_waiters();
        let answer = match reply {
            None => act(&mut lock(&self.state)),
            Some(Reply::Slow(delay)) => {
                tokio::time::sleep(delay).await;
                act(&mut lock(&self.state))
            }
            Some(Reply::Late(delay)) => {
                let done = act(&mut lock(&self.state));
                tokio::time::sleep(delay).await;
                done
            }
            Some(Reply::Fail(error)) => Err(error),
            Some(Reply::Lose(error)) => act(&mut lock(&self.state)).and(Err(error)),
            Some(Reply::Hang) => std::future::pending().await,
        };
        self.called.notify_waiters();
        answer
    }
}

impl State {
    fn check(&self, instance: InstanceId) -> Result<(), StoreError> {
        if self.evicted.contains(&instance) {
            return Err(StoreError::Evicted(instance));
        }
        if self.strict && !self.members.contains(&instance) {
            return Err(StoreError::NotRegistered(instance));
        }
        Ok(())
    }
}

impl WorkStore for FakeStore {
    fn claim(&self, request: ClaimRequest) -> PortFuture<'_, Claimed> {
        Box::pin(self.answer(Call::Claim(request.clone()), move |state| {
            state.check(request.instance)?;
            Ok(state.table.claim(&request))
        }))
    }

    fn settle(&self, instance: InstanceId, items: Vec<SettleItem>) -> PortFuture<'_, Settled> {
        Box::pin(self.answer(Call::Settle(items.clone()), move |state| {
            state.check(instance)?;
            let settled = state.table.settle(instance, &items);
            let fenced: HashSet<_> = settled.fenced.iter().collect();
            let applied = items.into_iter().filter(|item| !fenced.contains(&item.key));
            state.settled.extend(applied.map(|item| (item.key, item.epoch, item.verdict)));
            Ok(settled)
        }))
    }

    fn release_unheld(&self, instance: InstanceId, held: Vec<(WorkKey, ClaimEpoch)>) -> PortFuture<'_, u64> {
        Box::pin(self.answer(Call::ReleaseUnheld(held.clone()), move |state| {
            state.check(instance)?;
            Ok(state.table.release(instance, &held))
        }))
    }

    fn next_claimable_in(&self, _: InstanceId) -> PortFuture<'_, Option<Duration>> {
        Box::pin(self.answer(Call::NextDue, |state| Ok(state.table.next_claimable_in())))
    }
}

impl Doorbell for FakeStore {
    fn arm(&self, _: InstanceId, wait: Duration, mode: ArmMode) -> PortFuture<'_, Option<Armed>> {
        Box::pin(async move {
            self.answer(Call::Arm(mode, wait), |_| Ok(())).await?;
            let mut producers = self.producers.subscribe();
            let ended = tokio::time::timeout(wait, producers.wait_for(|at_work| !at_work)).await.is_ok();
            let mut state = lock(&self.state);
            if !ended && state.armed.is_none() {
                return Ok(None);
            }
            state.armed = Some(mode);
            let mut session = state.session.get_or_insert_with(|| watch::Sender::new(())).subscribe();
            Ok(Some(Armed::until(async move { while session.changed().await.is_ok() {} })))
        })
    }

    fn disarm(&self, _: InstanceId) -> PortFuture<'_, ()> {
        Box::pin(async move {
            if lock(&self.state).armed.is_none() {
                return Ok(());
            }
            self.answer(Call::Disarm, |state| {
                state.armed = None;
                Ok(())
            })
            .await
        })
    }

    fn pass_ring(&self, _: InstanceId) -> PortFuture<'_, bool> {
        Box::pin(self.answer(Call::Pass, |_| Ok(true)))
    }
}

impl InstanceStore for FakeStore {
    fn schema_ready(&self) -> PortFuture<'_, bool> {
        Box::pin(self.answer(Call::Schema, |state| Ok(state.schema)))
    }

    fn beat(&self, beat: Beat) -> PortFuture<'_, BeatAnswer> {
        let instance = beat.identity.id;
        Box::pin(self.answer(Call::Beat(beat), move |state| {
            if state.evicted.contains(&instance) {
                return Ok(BeatAnswer::Evicted);
            }
            state.members.insert(instance);
            Ok(BeatAnswer::Accepted)
        }))
    }

    fn deregister(&self, instance: InstanceId) -> PortFuture<'_, ()> {
        Box::pin(self.answer(Call::Deregister(instance), move |state| {
            state.members.remove(&instance);
            state.table.release(instance, &[]);
            Ok(())
        }))
    }
}

impl RenewalStore for FakeStore {
    fn renew(
        &self,
        instance: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        lease: Duration,
    ) -> PortFuture<'_, Vec<Renewal>> {
        Box::pin(self.answer(Call::Renew(items.clone(), lease), move |state| {
            state.check(instance)?;
            Ok(state.table.renew(instance, &items, &state.locked, lease))
        }))
    }
}
