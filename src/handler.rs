//! User code: publishers for the outbox, handlers for the inbox, and how they become the engine's runners.
//!
//! The rule: user code sees typed messages and answers with a verdict; it never sees a lease or a lock. What it wrote outside the
//! database may happen again (at least once); the token `(message_id, claim_epoch)` lets other systems tell.

use std::collections::HashMap;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use workpump_actors::delivery::{ExtendError, LeaseHandle};
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::standing::{Trust, Untrusted};
use workpump_actors::work::FailureReason;

/// One message to publish.
#[derive(Debug, Clone)]
pub struct OutboxMessage {
    /// Its id: the same at every attempt, so the key by which receivers recognise a repetition.
    pub message_id: Uuid,
    /// The stream it is ordered in, if any.
    pub stream_id: Option<Uuid>,
    /// Its type.
    pub message_type: Arc<str>,
    /// Where it should go, if the producer said so.
    pub destination: Option<Arc<str>>,
    /// The instance that publishes it now.
    pub instance_id: Uuid,
    /// Grows with every claim: of two publications of one message, the one with the higher epoch is the later.
    pub claim_epoch: i64,
    /// Claims so far, this one included.
    pub attempts: u32,
    /// The payload, as JSON text.
    pub payload: Bytes,
    /// The metadata, as JSON text, if any.
    pub metadata: Option<Bytes>,
    /// Fires when the lease is about to end or is lost: whatever is published later may be published again by another instance.
    pub cancel: CancellationToken,
    hold: Hold,
}

/// What stands behind a message in a publisher's hands.
#[derive(Debug, Clone)]
enum Hold {
    /// A lease.
    Leased { lease: Arc<LeaseHandle>, trust: Trust },
    /// Nothing: it was made by a test.
    Free { deadline: Instant },
}

impl OutboxMessage {
    /// How long a message made by [`OutboxMessage::for_test`] may take.
    const FREE: Duration = Duration::from_hours(1);

    /// A message for tests of publishers: the first attempt, without stream, destination or metadata, until you set them; due in an hour.
    /// No lease stands behind it: [`extend`](Self::extend) gives it another hour, and [`ensure_trusted`](Self::ensure_trusted) agrees, both
    /// until `cancel` fires.
    ///
    /// ```
    /// # use workpump::OutboxMessage;
    /// let mut message = OutboxMessage::for_test("order.placed", &serde_json::json!({ "order": 17 }));
    /// message.destination = Some("orders".into());
    /// message.attempts = 3;
    /// ```
    ///
    /// # Panics
    ///
    /// When the payload does not serialize.
    pub fn for_test(message_type: &str, payload: &(impl Serialize + ?Sized)) -> Self {
        let payload = serde_json::to_vec(payload).expect("a payload that serializes");
        Self {
            message_id: Uuid::now_v7(),
            stream_id: None,
            message_type: message_type.into(),
            destination: None,
            instance_id: Uuid::now_v7(),
            claim_epoch: 1,
            attempts: 1,
            payload: payload.into(),
            metadata: None,
            cancel: CancellationToken::new(),
            hold: Hold::Free { deadline: Instant::now() + Self::FREE },
        }
    }

    /// The payload as a value of type `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        decode(&self.payload)
    }

    /// When this publisher is told to stop with this message, unless its lease is renewed before: by itself at 0.8 of the lease, as often
    /// as `lease_renewal.max_renewals_per_work` allows, or by [`extend`](Self::extend).
    pub fn deadline(&self) -> Instant {
        match &self.hold {
            Hold::Leased { lease, .. } => lease.deadline(),
            Hold::Free { deadline } => *deadline,
        }
    }

    /// Has the lease renewed now and returns the new deadline, as the database has confirmed it. Uses up one of the renewals. The
    /// messages leased before it in its stream go with it; for any other message of a batch ask that one.
    ///
    /// Leases are renewed by themselves while the publisher works; this is for one that wants to be sure before it begins something long.
    pub async fn extend(&self) -> Result<Instant, ExtendError> {
        match &self.hold {
            Hold::Leased { lease, .. } => lease.extend().await,
            Hold::Free { .. } if self.cancel.is_cancelled() => Err(ExtendError::Lost),
            Hold::Free { .. } => Ok(Instant::now() + Self::FREE),
        }
    }

    /// Proves at this moment that this instance is still a member and the lease of the message not over: to be awaited before it is handed
    /// to a transport that cannot recognise a repetition. What it proves, and what it does not: [`Context::ensure_trusted`].
    ///
    /// # Errors
    ///
    /// When the lease is over or the instance was evicted, stop: the message is, or will be, somebody else's. When the database does not
    /// confirm in time, nothing is known; a retry is the right answer.
    pub async fn ensure_trusted(&self) -> Result<(), Untrusted> {
        match &self.hold {
            Hold::Leased { trust, .. } => prove(&self.cancel, trust).await,
            Hold::Free { .. } if self.cancel.is_cancelled() => Err(Untrusted::LeaseOver),
            Hold::Free { .. } => Ok(()),
        }
    }

    /// Until when no peer can have taken this instance for dead, by the monotonic clock of this process. `None` before the first
    /// heartbeat, and for a message of a test.
    pub fn trusted_until(&self) -> Option<std::time::Instant> {
        match &self.hold {
            Hold::Leased { trust, .. } => trust.until(),
            Hold::Free { .. } => None,
        }
    }
}

impl From<Job> for OutboxMessage {
    fn from(job: Job) -> Self {
        Self {
            message_id: job.work.key.id.0,
            stream_id: job.work.stream_id,
            message_type: job.work.message_type.unwrap_or_default(),
            destination: job.work.name,
            instance_id: job.instance.0,
            claim_epoch: job.work.epoch.0,
            attempts: job.work.attempts,
            payload: job.work.payload,
            metadata: job.work.metadata,
            cancel: job.cancel,
            hold: Hold::Leased { lease: job.lease, trust: job.trust },
        }
    }
}

/// What became of one message.
pub type Outcome = Result<(), Failure>;

/// Sends messages of the outbox to wherever they belong.
///
/// [`Publisher::publish_one`] is enough. When the transport takes many messages at once, say so with [`Publisher::max_batch`] and write
/// [`Publisher::publish`] too.
pub trait Publisher: Send + Sync + 'static {
    /// Publishes one message. An error is a failed attempt: the message, and what follows it in its stream, comes again.
    fn publish_one(&self, message: &OutboxMessage) -> impl Future<Output = Outcome> + Send;

    /// Publishes many messages and answers for each, in the same order. Messages of one stream are in order; what follows a failed
    /// message of its stream counts as not published, whatever is answered for it. The default publishes them one after another and
    /// leaves a stream alone after its first failure.
    fn publish(&self, batch: &[OutboxMessage]) -> impl Future<Output = Vec<Outcome>> + Send {
        async move {
            let mut stopped: Vec<Uuid> = Vec::new();
            let mut answers = Vec::with_capacity(batch.len());
            for message in batch {
                if message.stream_id.is_some_and(|stream| stopped.contains(&stream)) {
                    answers
                        .push(Err(Failure::retry("not published: an earlier message of the stream failed")));
                    continue;
                }
                let answer = self.publish_one(message).await;
                if let (Err(_), Some(stream)) = (&answer, message.stream_id) {
                    stopped.push(stream);
                }
                answers.push(answer);
            }
            answers
        }
    }

    /// Messages per call of [`Publisher::publish`] at most. Default 1: every message by itself, many at the same time.
    fn max_batch(&self) -> usize {
        1
    }
}

/// A [`Publisher`] as the engine runs it.
pub(crate) struct PublisherRunner<P>(pub(crate) Arc<P>);

impl<P: Publisher> Runner for PublisherRunner<P> {
    fn max_batch(&self) -> usize {
        self.0.max_batch()
    }

    fn run(&self, job: Job) -> BoxFuture<'static, Result<(), Failure>> {
        let publisher = Arc::clone(&self.0);
        async move { publisher.publish_one(&job.into()).await }.boxed()
    }

    fn run_batch(&self, jobs: Vec<Job>) -> BoxFuture<'static, Vec<Result<(), Failure>>> {
        let publisher = Arc::clone(&self.0);
        async move {
            let batch: Vec<OutboxMessage> = jobs.into_iter().map(OutboxMessage::from).collect();
            publisher.publish(&batch).await
        }
        .boxed()
    }
}

/// What a handler may know about the message in its hands.
#[derive(Debug)]
pub struct Context<'a> {
    job: &'a Job,
}

impl Context<'_> {
    /// The message's id: the same at every attempt.
    pub fn message_id(&self) -> Uuid {
        self.job.work.key.id.0
    }

    /// The stream it is ordered in, if any.
    pub fn stream_id(&self) -> Option<Uuid> {
        self.job.work.stream_id
    }

    /// Grows with every claim; with the message id, the token for systems that can refuse a late repetition.
    pub fn claim_epoch(&self) -> i64 {
        self.job.work.epoch.0
    }

    /// Claims so far, this one included.
    pub fn attempts(&self) -> u32 {
        self.job.work.attempts
    }

    /// The message's type.
    pub fn message_type(&self) -> &str {
        self.job.work.message_type.as_deref().unwrap_or_default()
    }

    /// The metadata as a value of type `T`; `None` when there is none.
    pub fn metadata<T: DeserializeOwned>(&self) -> Result<Option<T>, Failure> {
        self.job.work.metadata.as_ref().map(decode).transpose()
    }

    /// Proves at this moment that this instance is still a member and the lease of the row not over: to be awaited before an effect that
    /// no database can undo. One heartbeat, sent after this call and shared with every other handler that asks.
    ///
    /// When it answers `Ok`, nobody else can have been given the row before [`trusted_until`](Self::trusted_until): that is what it
    /// proves, and no more. A process that is frozen between this answer and the effect acts as late as it wakes up; against that only the
    /// receiver can help, by refusing a [`claim_epoch`](Self::claim_epoch) lower than one it has seen for the same message.
    ///
    /// # Errors
    ///
    /// When the lease is over or the instance was evicted, stop: the row is, or will be, somebody else's. When the database does not
    /// confirm in time, nothing is known; a retry is the right answer.
    pub async fn ensure_trusted(&self) -> Result<(), Untrusted> {
        prove(&self.job.cancel, &self.job.trust).await
    }

    /// Until when no peer can have taken this instance for dead, by the monotonic clock of this process. `None` before the first
    /// heartbeat.
    pub fn trusted_until(&self) -> Option<std::time::Instant> {
        self.job.trust.until()
    }

    /// When this handler is told to stop, unless its lease is renewed before: by itself at 0.8 of the lease, as often as
    /// `lease_renewal.max_renewals_per_work` allows, or by [`Context::extend`].
    pub fn deadline(&self) -> Instant {
        self.job.lease.deadline()
    }

    /// Has the lease renewed now and returns the new deadline, as the database has confirmed it. Uses up one of the renewals.
    ///
    /// Handlers are renewed by themselves; this is for one that wants to be sure before it begins something long.
    pub async fn extend(&self) -> Result<Instant, ExtendError> {
        self.job.lease.extend().await
    }

    /// Fires when the lease is about to end or is lost. From then on nothing this handler reports counts.
    pub fn cancellation(&self) -> &CancellationToken {
        &self.job.cancel
    }
}

async fn prove(cancel: &CancellationToken, trust: &Trust) -> Result<(), Untrusted> {
    if cancel.is_cancelled() {
        return Err(Untrusted::LeaseOver);
    }
    trust.prove().await?;
    if cancel.is_cancelled() { Err(Untrusted::LeaseOver) } else { Ok(()) }
}

/// Handles messages of one type.
pub trait Handler<M>: Send + Sync + 'static {
    /// Handles one message. `Ok` completes it; an error is a failed attempt; a panic too.
    fn handle(&self, cx: &mut Context<'_>, message: M) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// A handler whose message type is hidden.
trait AnyHandler: Send + Sync + 'static {
    fn run(self: Arc<Self>, job: Job) -> BoxFuture<'static, Result<(), Failure>>;
}

struct Typed<M, H> {
    handler: H,
    message: PhantomData<fn(M)>,
}

impl<M: DeserializeOwned + Send + 'static, H: Handler<M>> AnyHandler for Typed<M, H> {
    fn run(self: Arc<Self>, job: Job) -> BoxFuture<'static, Result<(), Failure>> {
        async move {
            let message: M = decode(&job.work.payload)?;
            self.handler.handle(&mut Context { job: &job }, message).await
        }
        .boxed()
    }
}

/// The inbox handlers by message type, as the engine runs them.
#[derive(Default)]
pub(crate) struct Handlers(HashMap<String, Arc<dyn AnyHandler>>);

impl Handlers {
    /// Adds a handler; false when the type has one already.
    pub(crate) fn add<M, H>(&mut self, message_type: String, handler: H) -> bool
    where
        M: DeserializeOwned + Send + 'static,
        H: Handler<M>,
    {
        self.0.insert(message_type, Arc::new(Typed { handler, message: PhantomData })).is_none()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Runner for Handlers {
    fn run(&self, job: Job) -> BoxFuture<'static, Result<(), Failure>> {
        let message_type = job.work.message_type.as_deref().unwrap_or_default();
        if let Some(handler) = self.0.get(message_type) {
            return Arc::clone(handler).run(job);
        }
        let mut known: Vec<&str> = self.0.keys().map(String::as_str).collect();
        known.sort_unstable();
        let error = format!(
            "no handler for message type {message_type:?}; this instance handles {}",
            known.join(", ")
        );
        std::future::ready(Err(undecodable(error))).boxed()
    }
}

fn decode<T: DeserializeOwned>(json: &Bytes) -> Result<T, Failure> {
    serde_json::from_slice(json)
        .map_err(|error| undecodable(format!("the body does not fit its type: {error}")))
}

fn undecodable(error: String) -> Failure {
    Failure::Retry { after: None, reason: FailureReason::Serialization, error }
}
