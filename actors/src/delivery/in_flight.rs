//! Every claim that somebody in this process still holds.
//!
//! The rule: a row stands here from the moment it is taken in hand until its permit returns. The failures this prevents: a recovery that
//! hands back rows that are running, and a renewal that forgets a row of the run it is about.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::lease::{Lease, LeaseHandle};
use crate::lock;
use crate::work::{ClaimEpoch, WorkKey};

/// Every claim that somebody in this process still holds.
///
/// One row can be held under two epochs: its lease ran out while its handler went on, and it was claimed here again.
#[derive(Debug, Default)]
pub struct InFlight {
    rows: Mutex<HashMap<WorkKey, Claims>>,
}

#[derive(Debug)]
struct Claims {
    first: Arc<LeaseHandle>,
    more: Vec<Arc<LeaseHandle>>,
}

impl Claims {
    fn all(&self) -> impl Iterator<Item = &Arc<LeaseHandle>> {
        std::iter::once(&self.first).chain(&self.more)
    }
}

impl InFlight {
    /// Everything held now.
    pub fn held(&self) -> Vec<(WorkKey, ClaimEpoch)> {
        let rows = lock(&self.rows);
        let mut held = Vec::with_capacity(rows.len());
        held.extend(rows.values().flat_map(Claims::all).map(|lease| (lease.key(), lease.epoch())));
        held
    }

    /// How many rows are held.
    pub fn len(&self) -> usize {
        lock(&self.rows).len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The lease of this claim, if it is held.
    pub fn find(&self, key: &WorkKey, epoch: ClaimEpoch) -> Option<Arc<LeaseHandle>> {
        lock(&self.rows).get(key)?.all().find(|lease| lease.epoch() == epoch).cloned()
    }

    /// The leases for which this holds. Looks at every row: not for every row.
    pub(crate) fn select(&self, wanted: impl Fn(&LeaseHandle) -> bool) -> Vec<Arc<LeaseHandle>> {
        let rows = lock(&self.rows);
        rows.values().flat_map(Claims::all).filter(|lease| wanted(lease)).cloned().collect()
    }

    /// The leases that these claims have given.
    pub(crate) fn of_claims(&self, claims: &[Arc<Lease>]) -> Vec<Arc<LeaseHandle>> {
        if claims.is_empty() {
            return Vec::new();
        }
        self.select(|lease| claims.iter().any(|claim| lease.is_of(claim)))
    }

    /// Whether this row is held under more than one epoch.
    pub(crate) fn overlaps(&self, key: &WorkKey) -> bool {
        lock(&self.rows).get(key).is_some_and(|claims| !claims.more.is_empty())
    }

    pub(super) fn insert(&self, lease: Arc<LeaseHandle>) -> bool {
        use std::collections::hash_map::Entry;
        match lock(&self.rows).entry(lease.key()) {
            Entry::Vacant(entry) => {
                entry.insert(Claims { first: lease, more: Vec::new() });
                false
            }
            Entry::Occupied(mut entry) => {
                entry.get_mut().more.push(lease);
                true
            }
        }
    }

    pub(super) fn remove(&self, key: &WorkKey, lease: &Arc<LeaseHandle>) {
        let mut rows = lock(&self.rows);
        let Some(claims) = rows.get_mut(key) else { return };
        if let Some(at) = claims.more.iter().position(|other| Arc::ptr_eq(other, lease)) {
            claims.more.swap_remove(at);
        } else if let Some(other) = claims.more.pop() {
            claims.first = other;
        } else {
            rows.remove(key);
        }
    }
}
