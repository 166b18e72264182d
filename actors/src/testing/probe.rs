//! Stand-ins for neighbours.

use std::sync::Arc;

use actix::prelude::*;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use crate::runner::{Failure, Job, Runner};

/// Receives messages of one kind and keeps them for the test.
#[derive(Debug)]
pub struct Probe<M: Message<Result = ()> + Send + 'static> {
    recipient: Recipient<M>,
    received: mpsc::UnboundedReceiver<M>,
}

struct ProbeActor<M>(mpsc::UnboundedSender<M>);

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

impl<M: Message<Result = ()> + Send + Unpin + 'static> Probe<M> {
    /// A fresh one on this thread.
    pub fn start() -> Self {
        let (sender, received) = mpsc::unbounded_channel();
        Self { recipient: ProbeActor(sender).start().recipient(), received }
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
