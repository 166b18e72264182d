//! The life of one actor.
//!
//! The rule: a panic is caught outside the actor, which is then ended without running its own clean-up. The failures this prevents: an
//! actor that dies in silence, and a `stopped()` that panics during a panic and takes the whole process down.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use actix::dev::ContextFut;
use actix::dev::channel::AddressReceiver;
use actix::prelude::*;
use tokio::sync::{oneshot, watch};

use super::spec::Ready;

/// How the life of an actor ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was asked to stop, or stopped by itself.
    Stopped,
    /// It panicked.
    Panicked(String),
    /// Its thread ended under it.
    ThreadGone,
}

/// Reports the exit, even when the thread ends.
struct Report(watch::Sender<Option<Exit>>);

impl Report {
    fn exit(&self, exit: Exit) {
        // Nobody watches once the registry is gone.
        let _ = self.0.send(Some(exit));
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        self.0.send_if_modified(|exit| {
            let unreported = exit.is_none();
            if unreported {
                *exit = Some(Exit::ThreadGone);
            }
            unreported
        });
    }
}

struct Life<A: Actor<Context = Context<A>>> {
    future: Option<ContextFut<A, Context<A>>>,
    stop: Option<oneshot::Receiver<()>>,
    kill: Option<oneshot::Receiver<()>>,
    report: Report,
}

/// Makes an actor and runs it on this thread.
pub(super) fn run<A: Actor<Context = Context<A>>>(
    make: impl FnOnce() -> (A, Option<Ready>),
    mailbox: AddressReceiver<A>,
    stop: oneshot::Receiver<()>,
    kill: oneshot::Receiver<()>,
    exited: watch::Sender<Option<Exit>>,
) {
    let report = Report(exited);
    let (actor, ready) = match catch_unwind(AssertUnwindSafe(make)) {
        Ok(newborn) => newborn,
        Err(panic) => return report.exit(Exit::Panicked(panic_text(&*panic))),
    };
    let mut ctx = Context::with_receiver(mailbox);
    if let Some(ready) = ready {
        // Polled for the first time when every wait of `started()` is over.
        ctx.spawn(async move { ready.ready() }.into_actor(&actor));
    }
    let future = Some(ctx.into_future(actor));
    actix_rt::spawn(Life { future, stop: Some(stop), kill: Some(kill), report });
}

impl<A: Actor<Context = Context<A>>> Life<A> {
    /// Whether the signal came. A dropped sender is no signal: the registry has let the actor go on.
    fn signalled(signal: &mut Option<oneshot::Receiver<()>>, cx: &mut TaskContext<'_>) -> bool {
        let Some(receiver) = signal else { return false };
        let Poll::Ready(answer) = Pin::new(receiver).poll(cx) else { return false };
        *signal = None;
        answer.is_ok()
    }

    fn end(&mut self, exit: Exit) -> Poll<()> {
        let future = self.future.take();
        if catch_unwind(AssertUnwindSafe(|| drop(future))).is_err() {
            tracing::error!("an actor panicked while it was dropped");
        }
        self.report.exit(exit);
        Poll::Ready(())
    }
}

impl<A: Actor<Context = Context<A>>> Future for Life<A> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<()> {
        let this = &mut *self;
        let stop = Self::signalled(&mut this.stop, cx);
        let kill = Self::signalled(&mut this.kill, cx);
        let Some(future) = this.future.as_mut() else { return Poll::Ready(()) };
        if stop {
            future.ctx().stop();
        }
        if kill {
            future.ctx().terminate();
        }
        match catch_unwind(AssertUnwindSafe(|| Pin::new(&mut *future).poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => this.end(Exit::Stopped),
            Err(panic) => {
                // Otherwise dropping the future would run `stopped()` on a broken actor.
                future.ctx().terminate();
                this.end(Exit::Panicked(panic_text(&*panic)))
            }
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "something that is not text".to_owned()
    }
}
