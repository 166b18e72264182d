//! The queue that outlives its actor, and the pump that feeds it to one incarnation.
//!
//! The rule: the registry owns the receiving half; only the incarnation whose generation the slot names may read. The failures this
//! prevents: messages lost with the actor that died before them, and a stuck incarnation that wakes up and takes its successor's messages.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use actix::dev::channel::{AddressReceiver, channel};
use actix::dev::{Envelope, EnvelopeProxy};
use actix::prelude::*;
use futures_util::Stream;
use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use super::child::Report;
use super::exit::caught;
use super::lock;

/// Messages in a row before the other actors of the thread get their turn, and how long they may take: slow ones end a burst early.
const BURST: u32 = 64;
const BURST_TIME: Duration = Duration::from_millis(5);

/// Nobody's generation.
const NOBODY: u64 = 0;

/// The receiving half of a stable address.
pub(super) struct Mailbox<A: Actor>(Arc<Mutex<Slot<A>>>);

struct Slot<A: Actor> {
    queue: Option<AddressReceiver<A>>,
    reader: u64,
}

impl<A: Actor> Clone for Mailbox<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Actor> Mailbox<A> {
    /// An address and its queue. Senders who care wait when `capacity` messages are in it.
    pub(super) fn new(capacity: usize) -> (Addr<A>, Self) {
        let (sender, queue) = channel(capacity);
        (Addr::new(sender), Self(Arc::new(Mutex::new(Slot { queue: Some(queue), reader: NOBODY }))))
    }

    /// From now on only this generation reads.
    pub(super) fn hand_to(&self, generation: u64) {
        lock(&self.0).reader = generation;
    }

    /// From now on nobody reads.
    pub(super) fn fence(&self) {
        self.hand_to(NOBODY);
    }

    /// Closes the address for good. Returns how many messages were never delivered.
    pub(super) fn close(&self) -> u64 {
        let Some(mut queue) = lock(&self.0).queue.take() else { return 0 };
        let mut cx = TaskContext::from_waker(Waker::noop());
        let mut undelivered = 0;
        while let Poll::Ready(Some(message)) = Pin::new(&mut queue).poll_next(&mut cx) {
            undelivered += 1;
            // The code of a user runs here, and whoever closes has more to do.
            if let Err(panic) = caught(|| drop(message)) {
                tracing::error!(panic, "an undelivered message panicked while it was dropped");
            }
        }
        undelivered
    }

    /// The next message for this generation; `None` when it may not read any more.
    fn poll_next(&self, generation: u64, cx: &mut TaskContext<'_>) -> Poll<Option<Envelope<A>>> {
        let mut slot = lock(&self.0);
        let reader = slot.reader;
        match &mut slot.queue {
            Some(queue) if reader == generation => Pin::new(queue).poll_next(cx),
            _ => Poll::Ready(None),
        }
    }
}

/// Signs of life of one incarnation, and what its supervisor wants from it between messages.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    beats: AtomicU64,
    pump: AtomicWaker,
    /// The pump was dropped while its actor lives on.
    pump_gone: AtomicBool,
    life: AtomicWaker,
    crash: AtomicBool,
}

impl Pulse {
    /// How often the mailbox was served.
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Acquire)
    }

    /// Asks for a beat.
    pub(super) fn probe(&self) {
        self.pump.wake();
    }

    /// Whether the actor has got rid of its pump: then it can never hear a message again.
    pub(super) fn pump_is_gone(&self, cx: &TaskContext<'_>) -> bool {
        self.life.register(cx.waker());
        self.pump_gone.load(Ordering::Acquire)
    }

    /// Makes the incarnation panic between two messages.
    #[cfg(feature = "testing")]
    pub(super) fn crash(&self) {
        self.crash.store(true, Ordering::Release);
        self.pump.wake();
    }
}

/// Feeds the messages of a mailbox to one incarnation.
pub(super) struct Pump<A: Actor> {
    mailbox: Mailbox<A>,
    generation: u64,
    pulse: Arc<Pulse>,
    /// Told at the first poll, which comes when every wait of `started()` is over.
    ready: Option<Arc<Report>>,
    resting: bool,
    rest: Arc<Rest>,
}

/// A pause that ends only when the thread has had a look at its timers, however often the actor is polled meanwhile.
#[derive(Debug, Default)]
struct Rest {
    over: AtomicBool,
    pump: AtomicWaker,
}

impl Wake for Rest {
    fn wake(self: Arc<Self>) {
        self.over.store(true, Ordering::Release);
        self.pump.wake();
    }
}

impl<A: Actor> Pump<A> {
    pub(super) fn new(
        mailbox: Mailbox<A>,
        generation: u64,
        pulse: Arc<Pulse>,
        ready: Option<Arc<Report>>,
    ) -> Self {
        Self { mailbox, generation, pulse, ready, resting: false, rest: Arc::default() }
    }

    /// Lets the rest of the thread run: timers and neighbours would starve behind a flood.
    fn step_aside(&mut self, cx: &TaskContext<'_>) {
        self.resting = true;
        self.rest.over.store(false, Ordering::Relaxed);
        self.rest.pump.register(cx.waker());
        let waker = Waker::from(Arc::clone(&self.rest));
        // The first poll of this future leaves the waker with the runtime, which wakes it after its next look at the timers.
        if pin!(tokio::task::yield_now()).poll(&mut TaskContext::from_waker(&waker)).is_ready() {
            waker.wake();
        }
    }

    fn is_resting(&mut self, cx: &TaskContext<'_>) -> bool {
        if self.resting {
            self.rest.pump.register(cx.waker());
            self.resting = !self.rest.over.load(Ordering::Acquire);
        }
        self.resting
    }
}

impl<A: Actor> Drop for Pump<A> {
    fn drop(&mut self) {
        self.pulse.pump_gone.store(true, Ordering::Release);
        self.pulse.life.wake();
    }
}

impl<A: Actor<Context = Context<A>>> ActorFuture<A> for Pump<A> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, actor: &mut A, ctx: &mut Context<A>, cx: &mut TaskContext<'_>) -> Poll<()> {
        let this = self.get_mut();
        this.pulse.beats.fetch_add(1, Ordering::AcqRel);
        this.pulse.pump.register(cx.waker());
        assert!(!this.pulse.crash.swap(false, Ordering::AcqRel), "crashed on demand");
        if let Some(ready) = this.ready.take() {
            ready.ready();
        }
        if this.is_resting(cx) {
            return Poll::Pending;
        }
        let began = Instant::now();
        for handled in 0..BURST {
            // Few looks at the clock, and the burst overshoots its time by no more than that again.
            if handled.is_power_of_two() && began.elapsed() >= BURST_TIME {
                break;
            }
            // An actor that waits for a future of its own, or stops, hears nothing.
            if ctx.waiting() {
                return Poll::Pending;
            }
            match this.mailbox.poll_next(this.generation, cx) {
                Poll::Ready(Some(mut envelope)) => envelope.handle(actor, ctx),
                Poll::Ready(None) => {
                    ctx.terminate();
                    return Poll::Pending;
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        this.step_aside(cx);
        Poll::Pending
    }
}
