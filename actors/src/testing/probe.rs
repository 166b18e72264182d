//! Stand-ins for neighbours.
//!
//! The rule: a probe keeps what it was sent until the test asks, and every wait has an end. The failures this prevents: tests that sleep and
//! hope, and tests that hang where they should fail.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::registry::{Name, Spec};
use crate::runner::{Failure, Job, Runner};

/// Receives messages of one kind and keeps them for the test.
///
/// Beside a tree, for what its actors send out:
///
/// ```
/// use std::time::Duration;
/// use workpump_actors::testing::{TestProbe, in_virtual_time};
///
/// # #[derive(Debug, PartialEq, actix::Message)]
/// # #[rtype(result = "()")]
/// # struct Mail(u32);
/// in_virtual_time(async {
///     let mut outbox = TestProbe::<Mail>::start();
///     outbox.recipient().do_send(Mail(1));
///     assert_eq!(outbox.expect_within(Duration::from_secs(1)).await, Mail(1));
///     outbox.expect_none(Duration::from_secs(60)).await;
/// });
/// ```
///
/// Or as a child of one, in the place of the real actor:
///
/// ```
/// use std::time::Duration;
/// use workpump_actors::registry::{Group, Host};
/// use workpump_actors::testing::{TestProbe, in_virtual_time};
///
/// # #[derive(Debug, PartialEq, actix::Message)]
/// # #[rtype(result = "()")]
/// # struct Mail(u32);
/// in_virtual_time(async {
///     let (mut mailer, spec) = TestProbe::<Mail>::child("mailer");
///     let group = Group::new("test").child(spec);
///     let registry = group.start(Host::current(), Duration::from_secs(5)).await.expect("starts");
///     registry.recipient::<Mail>().expect("the probe provides it").do_send(Mail(1));
///     assert_eq!(mailer.expect_within(Duration::from_secs(1)).await, Mail(1));
///     registry.shutdown().await;
/// });
/// ```
#[derive(Debug)]
pub struct TestProbe<M: Message<Result = ()> + Send + 'static> {
    recipient: Recipient<M>,
    received: mpsc::UnboundedReceiver<M>,
}

/// The actor behind a [`TestProbe`].
pub struct ProbeActor<M>(mpsc::UnboundedSender<M>);

impl<M> fmt::Debug for ProbeActor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeActor").finish_non_exhaustive()
    }
}

impl<M: Unpin + 'static> Actor for ProbeActor<M> {
    type Context = Context<Self>;
}

impl<M: Message<Result = ()> + Send + Unpin + 'static> Handler<M> for ProbeActor<M> {
    type Result = ();

    fn handle(&mut self, message: M, _: &mut Self::Context) {
        // The test may have dropped its probe.
        let _ = self.0.send(message);
    }
}

impl<M: Message<Result = ()> + Send + Unpin + 'static> TestProbe<M> {
    /// A fresh one on this thread.
    pub fn start() -> Self {
        let (sender, received) = mpsc::unbounded_channel();
        Self { recipient: ProbeActor(sender).start().recipient(), received }
    }

    /// A fresh one that is to be a child of a tree, with its spec, which provides `M`. It keeps what it received over restarts.
    pub fn child(name: impl Into<Name>) -> (Self, Spec<ProbeActor<M>>) {
        let (sender, received) = mpsc::unbounded_channel();
        let spec = Spec::new(name, move |_| ProbeActor(sender.clone())).provides::<M>();
        (Self { recipient: spec.addr().recipient(), received }, spec)
    }

    /// Where to send to.
    pub fn recipient(&self) -> Recipient<M> {
        self.recipient.clone()
    }

    /// The next message, however long it takes.
    ///
    /// # Panics
    ///
    /// When no message can come any more.
    pub async fn next(&mut self) -> M {
        self.received.recv().await.expect("the probe actor lives as long as its recipient")
    }

    /// The next message, which has to come within this time.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub async fn expect_within(&mut self, limit: Duration) -> M {
        let came = timeout(limit, self.next()).await;
        came.unwrap_or_else(|_| panic!("no {} came within {limit:?}", type_name::<M>()))
    }

    /// Waits this long for a message that must not come.
    ///
    /// # Panics
    ///
    /// When one comes.
    pub async fn expect_none(&mut self, during: Duration) {
        let came = timeout(during, self.received.recv()).await.is_ok_and(|message| message.is_some());
        assert!(!came, "a {} came within {during:?}, and none should have", type_name::<M>());
    }

    /// What has come so far.
    pub fn take(&mut self) -> Vec<M> {
        std::iter::from_fn(|| self.received.try_recv().ok()).collect()
    }
}

struct FnRunner<F> {
    run: F,
    max_batch: usize,
}

/// A runner made of a closure, taking at most `max_batch` rows a call.
pub fn runner<F, R>(max_batch: usize, run: F) -> Arc<dyn Runner>
where
    F: Fn(Job) -> R + Send + Sync + 'static,
    R: Future<Output = Result<(), Failure>> + Send + 'static,
{
    Arc::new(FnRunner { run: move |job| -> BoxFuture<'static, _> { Box::pin(run(job)) }, max_batch })
}

impl<F> Runner for FnRunner<F>
where
    F: Fn(Job) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync + 'static,
{
    fn max_batch(&self) -> usize {
        self.max_batch
    }

    fn run(&self, job: Job) -> BoxFuture<'static, Result<(), Failure>> {
        (self.run)(job)
    }
}
