//! What the dispatch tests share: rows, results, and a history of what handlers did.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::sync::{Arc, Mutex};

use uuid::Uuid;
use workpump_actors::message::{Account, Observe};
use workpump_actors::port::Verdict;
use workpump_actors::runner::{Job, Runner};
use workpump_actors::testing::{DispatchRig, claimed, runner};
use workpump_actors::work::{Category, ClaimedWork, WorkKey};

/// The stream, the row, and what happened.
pub(crate) type Step = (Uuid, i64, &'static str);

/// What happened to rows, in order.
#[derive(Clone, Default)]
pub(crate) struct History(pub(crate) Arc<Mutex<Vec<Step>>>);

impl History {
    pub(crate) fn note(&self, job: &Job, what: &'static str) {
        let stream = job.work.stream_id.unwrap_or_default();
        self.0.lock().expect("not poisoned").push((stream, job.work.seq, what));
    }

    pub(crate) fn all(&self) -> Vec<Step> {
        self.0.lock().expect("not poisoned").clone()
    }

    pub(crate) fn started(&self) -> Vec<i64> {
        self.all().iter().filter(|(.., what)| *what == "start").map(|(_, seq, _)| *seq).collect()
    }
}

pub(crate) fn rows(stream: Option<Uuid>, seqs: std::ops::Range<i64>) -> Vec<ClaimedWork> {
    seqs.map(|seq| claimed(seq, stream)).collect()
}

pub(crate) fn inbox(runner: Arc<dyn Runner>) -> Vec<(Category, Arc<dyn Runner>)> {
    vec![(Category::Inbox, runner)]
}

pub(crate) fn done() -> Arc<dyn Runner> {
    runner(1, |_| async { Ok(()) })
}

/// Every result so far, in the order it was passed on.
pub(crate) fn results(rig: &mut DispatchRig) -> Vec<(WorkKey, Verdict)> {
    rig.settle
        .take()
        .into_iter()
        .flat_map(|settle| settle.settlements)
        .map(|settlement| (settlement.key(), settlement.verdict().clone()))
        .collect()
}

pub(crate) async fn account(rig: &DispatchRig) -> Account {
    rig.addr.send(Observe).await.expect("alive")
}

pub(crate) fn assert_all_permits_are_back(rig: &DispatchRig) {
    assert_eq!(rig.permits.available_permits(), 2_000);
    assert!(rig.in_flight.is_empty());
}
