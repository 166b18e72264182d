//! One call of user code, fenced in.
//!
//! The rule: whatever user code does (return, fail, panic while it is made, polled or dropped), an answer comes out. The failure this
//! prevents: a panicking handler that takes a thread, a permit or its whole stream with it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;

use crate::delivery::{LeaseHandle, Running};
use crate::runner::{Failure, Job, Runner};

/// What user code answered.
#[derive(Debug)]
pub(crate) enum Answer {
    /// For one row.
    One(Result<(), Failure>),
    /// For a batch, in its order.
    Many(Vec<Result<(), Failure>>),
    /// It panicked, with this text.
    Panicked(String),
}

enum Call {
    One(BoxFuture<'static, Result<(), Failure>>),
    Many(BoxFuture<'static, Vec<Result<(), Failure>>>),
    Over(Option<Answer>),
}

/// The rows an attempt is about.
#[derive(Debug)]
pub(crate) enum Rows {
    /// One row.
    One(Running),
    /// Several, each with the index of its lane.
    Many(Vec<(usize, Running)>),
}

impl Rows {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(rows) => rows.len(),
        }
    }
}

/// A call in progress, with the rows it will settle.
pub(crate) struct Attempt {
    call: Call,
    pub(crate) rows: Rows,
}

impl Attempt {
    /// Calls the runner for one row.
    pub(crate) fn one(runner: &Arc<dyn Runner>, job: Job, running: Running) -> Self {
        let call = match catch_unwind(AssertUnwindSafe(|| runner.run(job))) {
            Ok(future) => Call::One(future),
            Err(panic) => Call::Over(Some(Answer::Panicked(panic_text(panic)))),
        };
        Self { call, rows: Rows::One(running) }
    }

    /// Calls the runner for several rows.
    pub(crate) fn many(runner: &Arc<dyn Runner>, jobs: Vec<Job>, running: Vec<(usize, Running)>) -> Self {
        let call = match catch_unwind(AssertUnwindSafe(|| runner.run_batch(jobs))) {
            Ok(future) => Call::Many(future),
            Err(panic) => Call::Over(Some(Answer::Panicked(panic_text(panic)))),
        };
        Self { call, rows: Rows::Many(running) }
    }

    /// Resolves when the last lease among its rows has ended.
    pub(crate) fn leases_ended(&self) -> impl Future<Output = ()> + use<> {
        let leases: Vec<Arc<LeaseHandle>> = match &self.rows {
            Rows::One(running) => vec![Arc::clone(running.lease())],
            Rows::Many(rows) => rows.iter().map(|(_, running)| Arc::clone(running.lease())).collect(),
        };
        async move {
            for lease in leases {
                lease.ended().await;
            }
        }
    }

    /// An attempt that nobody can make.
    pub(crate) fn refused(running: Running, failure: Failure) -> Self {
        Self { call: Call::Over(Some(Answer::One(Err(failure)))), rows: Rows::One(running) }
    }
}

impl Future for Attempt {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        let call = &mut self.call;
        let polled = catch_unwind(AssertUnwindSafe(|| match call {
            Call::One(future) => future.as_mut().poll(cx).map(Answer::One),
            Call::Many(future) => future.as_mut().poll(cx).map(Answer::Many),
            Call::Over(answer) => answer.take().map_or(Poll::Pending, Poll::Ready),
        }));
        let mut answer = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(answer)) => answer,
            Err(panic) => Answer::Panicked(panic_text(panic)),
        };
        let spent = std::mem::replace(&mut self.call, Call::Over(None));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(spent))) {
            answer = Answer::Panicked(panic_text(panic));
        }
        Poll::Ready(answer)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let spent = std::mem::replace(&mut self.call, Call::Over(None));
        if !matches!(spent, Call::Over(_)) {
            // Abandoned while running. A panic in its destructors must not reach the runtime.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(spent))) {
                forget(panic);
            }
        }
    }
}

/// What a panic said. What it carried is user code too.
fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = text_of(&*panic);
    forget(panic);
    text
}

/// Drops what a panic carried, and lets go of it should that panic again.
fn forget(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        format!("handler panicked: {text}")
    } else if let Some(text) = panic.downcast_ref::<String>() {
        format!("handler panicked: {text}")
    } else {
        "handler panicked with something that is not text".to_owned()
    }
}
