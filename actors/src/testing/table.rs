//! The work tables in memory: leases, epochs, attempts and order, by the same rules as the real ones.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use crate::instance::InstanceId;
use crate::port::{ClaimRequest, Claimed, Renewal, SettleItem, Settled, Verdict};
use crate::work::{Category, ClaimEpoch, ClaimedWork, OrderKey, WorkId, WorkKey};

/// A row to be stored.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which table.
    pub category: Category,
    /// The stream, if it is ordered.
    pub stream: Option<Uuid>,
    /// The name column.
    pub name: Option<Arc<str>>,
    /// Not claimable before so much time has passed.
    pub due_in: Duration,
    /// Earlier claims.
    pub attempts: u32,
    /// Earlier crashes.
    pub crash_count: u32,
    /// The body.
    pub payload: Bytes,
}

impl Default for Row {
    fn default() -> Self {
        Self {
            category: Category::Inbox,
            stream: None,
            name: None,
            due_in: Duration::ZERO,
            attempts: 0,
            crash_count: 0,
            payload: Bytes::new(),
        }
    }
}

impl Row {
    /// A row of this stream.
    pub fn of_stream(stream: Uuid) -> Self {
        Self { stream: Some(stream), ..Self::default() }
    }
}

/// A row as a claim would return it: number `seq`, of this stream, at its first attempt.
pub fn claimed(seq: i64, stream: Option<Uuid>) -> ClaimedWork {
    ClaimedWork {
        key: WorkKey { category: Category::Inbox, id: WorkId(Uuid::now_v7()) },
        epoch: ClaimEpoch(1),
        seq,
        stream_id: stream,
        partition: None,
        attempts: 1,
        crash_count: 0,
        lease_expiry: SystemTime::UNIX_EPOCH,
        name: None,
        message_type: None,
        event_id: None,
        payload: Bytes::new(),
        metadata: None,
    }
}

#[derive(Debug)]
struct Stored {
    row: Row,
    key: WorkKey,
    epoch: i64,
    due: Instant,
    lease: Option<(InstanceId, Instant)>,
    finished: Option<Verdict>,
}

impl Stored {
    fn order_key(&self) -> Option<OrderKey> {
        self.work(Duration::ZERO, 0).order_key()
    }

    fn work(&self, lease: Duration, seq: i64) -> ClaimedWork {
        ClaimedWork {
            key: self.key,
            epoch: ClaimEpoch(self.epoch),
            seq,
            stream_id: self.row.stream,
            partition: self.row.stream.map(|_| 0),
            attempts: self.row.attempts,
            crash_count: self.row.crash_count,
            lease_expiry: SystemTime::UNIX_EPOCH + lease,
            name: self.row.name.clone(),
            message_type: None,
            event_id: None,
            payload: self.row.payload.clone(),
            metadata: None,
        }
    }

    fn is_free(&self, now: Instant) -> bool {
        self.due <= now && self.lease.is_none_or(|(_, expiry)| expiry < now)
    }
}

/// Rows in arrival order.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Stored>,
    /// Where the unfinished rows begin.
    head: usize,
    unfinished: usize,
    index: HashMap<WorkKey, usize>,
}

impl Table {
    pub(super) fn insert(&mut self, row: Row) -> WorkKey {
        let key = WorkKey { category: row.category, id: WorkId(Uuid::now_v7()) };
        let due = Instant::now() + row.due_in;
        self.index.insert(key, self.rows.len());
        self.unfinished += 1;
        self.rows.push(Stored { row, key, epoch: 0, due, lease: None, finished: None });
        key
    }

    /// Head of line first: a row that cannot be claimed blocks the rest of its order key.
    pub(super) fn claim(&mut self, request: &ClaimRequest) -> Claimed {
        let now = Instant::now();
        let mut blocked = HashSet::new();
        let mut runs: HashMap<OrderKey, u32> = HashMap::new();
        let mut claimed = Claimed::default();
        for (seq, stored) in self.rows.iter_mut().enumerate().skip(self.head) {
            if stored.finished.is_some() || !request.categories.contains(&stored.key.category) {
                continue;
            }
            let order = stored.order_key();
            if order.as_ref().is_some_and(|order| blocked.contains(order)) {
                continue;
            }
            let run = order.as_ref().map_or(0, |order| runs.get(order).copied().unwrap_or_default());
            if !stored.is_free(now) || run >= request.stream_run {
                blocked.extend(order);
                continue;
            }
            if claimed.works.len() as u32 >= request.max_rows {
                claimed.has_more = true;
                break;
            }
            stored.epoch += 1;
            stored.row.attempts += 1;
            stored.lease = Some((request.instance, now + request.lease));
            claimed.works.push(stored.work(request.lease, seq as i64));
            if let Some(order) = order {
                runs.insert(order, run + 1);
            }
        }
        claimed
    }

    pub(super) fn settle(&mut self, instance: InstanceId, items: &[SettleItem]) -> Settled {
        let mut settled = Settled::default();
        for item in items {
            let at = self.index.get(&item.key).copied();
            let owned = at.is_some_and(|at| self.is_owned(at, instance, item.epoch));
            match at {
                Some(at) if owned => {
                    self.apply(at, &item.verdict);
                    settled.applied += 1;
                }
                _ => settled.fenced.push(item.key),
            }
        }
        settled
    }

    fn is_owned(&self, at: usize, instance: InstanceId, epoch: ClaimEpoch) -> bool {
        let stored = &self.rows[at];
        stored.finished.is_none()
            && stored.epoch == epoch.0
            && stored.lease.is_some_and(|(owner, _)| owner == instance)
    }

    fn apply(&mut self, at: usize, verdict: &Verdict) {
        let owner = self.rows[at].lease.take();
        match verdict {
            Verdict::Complete | Verdict::DeadLetter { .. } => {
                self.rows[at].finished = Some(verdict.clone());
                self.unfinished -= 1;
                while self.rows.get(self.head).is_some_and(|row| row.finished.is_some()) {
                    self.head += 1;
                }
            }
            Verdict::Release => self.rows[at].row.attempts -= 1,
            Verdict::Retry { after, .. } => {
                self.rows[at].due = Instant::now() + *after;
                if let (Some(order), Some((owner, _))) = (self.rows[at].order_key(), owner) {
                    self.hand_back_run(at, &order, owner);
                }
            }
        }
    }

    fn hand_back_run(&mut self, after: usize, order: &OrderKey, owner: InstanceId) {
        for stored in &mut self.rows[after + 1..] {
            let same = stored.finished.is_none() && stored.order_key().as_ref() == Some(order);
            if same && stored.lease.is_some_and(|(other, _)| other == owner) {
                stored.lease = None;
                stored.row.attempts -= 1;
            }
        }
    }

    pub(super) fn steal(&mut self, key: WorkKey) {
        let stored = &mut self.rows[self.index[&key]];
        stored.epoch += 1;
        stored.lease = Some((InstanceId::fresh(), Instant::now() + Duration::from_hours(1)));
    }

    pub(super) fn release(&mut self, instance: InstanceId, held: &[(WorkKey, ClaimEpoch)]) -> u64 {
        let held: HashSet<_> = held.iter().collect();
        let mut released = 0;
        for stored in &mut self.rows {
            let leased = stored.lease.is_some_and(|(owner, _)| owner == instance);
            if leased && stored.finished.is_none() && !held.contains(&(stored.key, ClaimEpoch(stored.epoch)))
            {
                stored.lease = None;
                stored.row.attempts -= 1;
                released += 1;
            }
        }
        released
    }

    /// Rows of a run go together, as in the real tables.
    pub(super) fn renew(
        &mut self,
        instance: InstanceId,
        items: &[(WorkKey, ClaimEpoch)],
        locked: &HashSet<WorkKey>,
        lease: Duration,
    ) -> Vec<Renewal> {
        let (now, wanted): (_, HashSet<_>) = (Instant::now(), items.iter().copied().collect());
        let mut stopped = HashSet::new();
        let mut answers = HashMap::new();
        for (at, stored) in self.rows.iter().enumerate().skip(self.head) {
            let Some((_, expiry)) = stored.lease.filter(|_| stored.finished.is_none()) else { continue };
            let item = (stored.key, ClaimEpoch(stored.epoch));
            let asked = wanted.contains(&item) && self.is_owned(at, instance, item.1) && expiry > now;
            let order = stored.order_key();
            let free =
                !locked.contains(&stored.key) && !order.as_ref().is_some_and(|order| stopped.contains(order));
            if !(asked && free) {
                stopped.extend(order);
            }
            if asked {
                answers.insert(item, if free { Renewal::Renewed } else { Renewal::Locked });
            }
        }
        for ((key, _), _) in answers.iter().filter(|(_, answer)| **answer == Renewal::Renewed) {
            self.rows[self.index[key]].lease = Some((instance, now + lease));
        }
        items.iter().map(|item| answers.get(item).copied().unwrap_or(Renewal::Lost)).collect()
    }

    pub(super) fn lease_left(&self, key: WorkKey) -> Option<Duration> {
        let (_, expiry) = self.rows[*self.index.get(&key)?].lease?;
        Some(expiry.saturating_duration_since(Instant::now()))
    }

    pub(super) fn next_claimable_in(&self) -> Option<Duration> {
        let now = Instant::now();
        self.rows
            .iter()
            .filter(|stored| stored.finished.is_none())
            .map(|stored| stored.due.max(stored.lease.map_or(stored.due, |(_, expiry)| expiry)))
            .min()
            .map(|at| at.saturating_duration_since(now))
    }

    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    pub(super) fn leased(&self) -> usize {
        self.rows.iter().filter(|stored| stored.lease.is_some()).count()
    }

    pub(super) fn verdict(&self, key: WorkKey) -> Option<Verdict> {
        self.rows[*self.index.get(&key)?].finished.clone()
    }

    pub(super) fn attempts(&self, key: WorkKey) -> Option<u32> {
        Some(self.rows[*self.index.get(&key)?].row.attempts)
    }
}
