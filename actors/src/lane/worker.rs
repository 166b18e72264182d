//! The loop that runs units.
//!
//! The rule: a handler is polled once where it stands; if it has to wait, the rest of its lane becomes a task of its own. The failures
//! this prevents: a task per row for handlers that never wait, and a slow handler that holds up its neighbours.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use futures_util::future::{AbortHandle, Abortable, Either, select};

use crate::lock;

use super::Crew;
use super::attempt::{Answer, Attempt};
use super::unit::{Start, Unit};

/// Attempts after which a worker lets the other tasks of its thread run.
const BURST: u32 = 32;

/// A worker's place in the count of workers, given back even when the worker is dropped.
pub(crate) struct Hired(Option<Arc<Crew>>);

impl Hired {
    pub(crate) fn new(crew: &Arc<Crew>) -> Self {
        Self(Some(Arc::clone(crew)))
    }
}

impl Drop for Hired {
    fn drop(&mut self) {
        if let Some(crew) = self.0.take() {
            crew.worker_lost();
        }
    }
}

/// Runs units until none is left.
pub(crate) async fn work(mut hired: Hired) {
    let Some(crew) = hired.0.clone() else { return };
    let mut burst = 0;
    while let Some(unit) = crew.next_unit() {
        run_inline(unit, &mut burst).await;
    }
    hired.0 = None;
    crew.desk().ring();
}

async fn run_inline(mut unit: Unit, burst: &mut u32) {
    loop {
        let mut attempt = match unit.start() {
            Start::Attempt(attempt) => attempt,
            Start::Over => return,
            Start::Hold => {
                let crew = Arc::clone(unit.crew());
                crew.put_back(unit);
                return;
            }
        };
        match poll_fn(|cx| Poll::Ready(Pin::new(&mut attempt).poll(cx))).await {
            Poll::Ready(answer) => unit.finish(attempt, answer),
            Poll::Pending => {
                unit.crew().desk().ring();
                spawn_rest(unit, attempt);
                // Without this the new task may sit in this thread's private slot while the next handler blocks the thread.
                step_aside().await;
                return;
            }
        }
        *burst += 1;
        if *burst >= BURST {
            *burst = 0;
            step_aside().await;
        }
    }
}

/// Goes to the end of this thread's queue, from where an idle thread may take it. Not tokio's `yield_now`: that keeps the task in a list of
/// the thread until the thread has nothing else to do, and a handler that blocks the thread meanwhile takes every such worker with it.
async fn step_aside() {
    let mut stepped = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut stepped, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Gives the rest of a unit a task of its own.
fn spawn_rest(unit: Unit, attempt: Attempt) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let crew = Arc::clone(unit.crew());
    let (handle, registration) = AbortHandle::new_pair();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(crew.tasks()).insert(id, handle);
    let entry = TaskEntry { crew: Arc::clone(&crew), id };
    crew.handlers().spawn(async move {
        let _entry = entry;
        // Aborted: the unit was dropped inside and has counted what it gave up.
        let _ = Abortable::new(run_rest(unit, attempt), registration).await;
    });
}

async fn run_rest(mut unit: Unit, mut attempt: Attempt) {
    loop {
        match until_its_lease_ends(&mut attempt).await {
            Some(answer) => unit.finish(attempt, answer),
            None => unit.abort(attempt),
        }
        unit.crew().desk().ring();
        attempt = match unit.start() {
            Start::Attempt(attempt) => attempt,
            Start::Over => return,
            Start::Hold => {
                let crew = Arc::clone(unit.crew());
                crew.put_back(unit);
                return;
            }
        };
    }
}

/// The answer, or `None` when the lease ended first. A handler that blocks its thread cannot be reached here: it keeps its permit, its
/// thread and its lane until it returns.
async fn until_its_lease_ends(attempt: &mut Attempt) -> Option<Answer> {
    let ended = pin!(attempt.leases_ended());
    match select(attempt, ended).await {
        Either::Left((answer, _)) => Some(answer),
        Either::Right(_) => None,
    }
}

struct TaskEntry {
    crew: Arc<Crew>,
    id: u64,
}

impl Drop for TaskEntry {
    fn drop(&mut self) {
        lock(self.crew.tasks()).remove(&self.id);
    }
}
