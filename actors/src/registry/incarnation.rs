//! One life of one actor.
//!
//! The rule: a panic is caught outside the actor, which is then dropped without running its own clean-up and never used again. The
//! failures this prevents: an actor that dies in silence, one that limps on with half-changed memory, and a `stopped()` that panics during
//! a panic and takes the whole process down.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use actix::dev::ContextFut;
use actix::prelude::*;
use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio::time::Sleep;

use super::Exit;
use super::child::Report;
use super::exit::caught;
use super::mailbox::{Mailbox, Pulse, Pump};

/// A request to stop within this time. If the sender is dropped instead, the supervisor has given this life up.
pub(super) type Stop = oneshot::Receiver<Duration>;

/// What a life needs from its supervisor.
pub(super) struct Birth<A: Actor> {
    pub(super) mailbox: Mailbox<A>,
    pub(super) generation: u64,
    pub(super) pulse: Arc<Pulse>,
    pub(super) stop: Stop,
    pub(super) report: Arc<Report>,
}

struct Life<A: Actor<Context = Context<A>>> {
    future: Option<ContextFut<A, Context<A>>>,
    stop: Option<Stop>,
    /// When it is ended if it has not stopped, and what to call that.
    deadline: Option<(Pin<Box<Sleep>>, Exit)>,
    asked: bool,
    /// It was polled, so it has run `started()`.
    began: bool,
    pulse: Arc<Pulse>,
    report: Arc<Report>,
}

/// Makes an actor with `make`, which also says whether the actor itself will tell that it is ready, and runs it on this thread.
pub(super) fn run<A: Actor<Context = Context<A>>>(birth: Birth<A>, make: impl FnOnce() -> (A, bool)) {
    let Birth { mailbox, generation, pulse, stop, report } = birth;
    let (actor, tells) = match caught(make) {
        Ok(newborn) => newborn,
        Err(panic) => return report.exit(Exit::FactoryPanicked(panic)),
    };
    let mut ctx = Context::new();
    let ready = (!tells).then(|| Arc::clone(&report));
    ctx.spawn(Pump::new(mailbox, generation, Arc::clone(&pulse), ready));
    let future = Some(ctx.into_future(actor));
    actix_rt::spawn(Life {
        future,
        stop: Some(stop),
        deadline: None,
        asked: false,
        began: false,
        pulse,
        report,
    });
}

impl<A: Actor<Context = Context<A>>> Life<A> {
    /// Hears what the supervisor wants. Returns whether it has given this life up.
    fn is_given_up(&mut self, cx: &mut TaskContext<'_>) -> bool {
        let (Some(stop), Some(future)) = (&mut self.stop, &mut self.future) else { return false };
        let Poll::Ready(answer) = stop.poll_unpin(cx) else { return false };
        self.stop = None;
        self.asked = true;
        let Ok(within) = answer else { return true };
        future.ctx().stop();
        let late = if within.is_zero() { Exit::Shutdown } else { Exit::Stuck };
        self.deadline = Some((Box::pin(tokio::time::sleep(within)), late));
        false
    }

    /// Why it is to be ended now: it has not stopped in time.
    fn is_late(&mut self, cx: &mut TaskContext<'_>) -> Option<Exit> {
        let (deadline, late) = self.deadline.as_mut()?;
        deadline.poll_unpin(cx).is_ready().then(|| late.clone())
    }

    /// Drops the actor where it stands: a context that is polled after `terminate` would run `started()` again, and one that is dropped
    /// without it would run `stopped()`, be it broken or not.
    fn cut_off(&mut self, exit: Exit) -> Poll<()> {
        if let Some(future) = &mut self.future {
            future.ctx().terminate();
        }
        self.end(exit)
    }

    /// Drops the actor, and then says that it is gone.
    fn end(&mut self, mut exit: Exit) -> Poll<()> {
        let future = self.future.take();
        if let Err(panic) = caught(|| drop(future)) {
            tracing::error!(panic, "an actor panicked while it was dropped");
            if !exit.is_failure() {
                exit = Exit::Panicked(panic);
            }
        }
        self.report.exit(exit);
        Poll::Ready(())
    }
}

impl<A: Actor<Context = Context<A>>> Future for Life<A> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.is_given_up(cx) {
            return this.cut_off(Exit::Shutdown);
        }
        let Some(future) = &mut this.future else { return Poll::Ready(()) };
        this.began = true;
        match caught(|| Pin::new(&mut *future).poll(cx)) {
            Ok(Poll::Pending) if this.pulse.pump_is_gone(cx) => {
                this.cut_off(Exit::Panicked("it cancelled the future that brings its messages".to_owned()))
            }
            Ok(Poll::Pending) => match this.is_late(cx) {
                Some(exit) => this.cut_off(exit),
                None => Poll::Pending,
            },
            Ok(Poll::Ready(())) if this.asked => this.end(Exit::Shutdown),
            Ok(Poll::Ready(())) => this.end(Exit::Stopped),
            Err(panic) => this.cut_off(Exit::Panicked(panic)),
        }
    }
}

impl<A: Actor<Context = Context<A>>> Drop for Life<A> {
    /// The thread ends under a living actor: its clean-up may run, and must not take the thread's own with it.
    fn drop(&mut self) {
        let Some(future) = &mut self.future else { return };
        if self.began {
            // Dropping the future would do this too; but an actor whose clean-up and whose drop both panic would abort the process.
            let cleaned = caught(|| {
                future.ctx().stop();
                Pin::new(&mut *future).poll(&mut TaskContext::from_waker(Waker::noop()))
            });
            if let Err(panic) = cleaned {
                tracing::error!(panic, "an actor panicked while its thread ended");
            }
        }
        future.ctx().terminate();
        // Nobody polls any more.
        let _ = self.end(Exit::ThreadGone);
    }
}
