//! Renewals that were asked for, kept where no crash of the renewer reaches them.
//!
//! The rule: a request stands here from the moment it is accepted until it is answered; a batch that is on its way stands here too, and
//! when it fails its requests are the first of the next one. The queue is bounded: whoever asks waits for room. The failures this prevents:
//! a handler that loses its row because the renewer died with the request in hand, and a queue that grows through an outage.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::batch::{Batch, Sorted};
use super::in_flight::InFlight;
use super::lease::LeaseHandle;
use crate::lock;
use crate::policy::lease::LeaseTerms;
use crate::port::Renewal;
use crate::work::{ClaimEpoch, WorkKey};

/// How often the renewer may die during the flush of one batch.
const MAX_DEATHS: u32 = 3;

/// Why a lease was not extended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtendError {
    /// It was renewed as often as `lease_renewal.max_renewals_per_work` allows; it goes on until its deadline.
    #[error("the lease was renewed {renewals} times already and will not be again")]
    AtCap {
        /// The cap.
        renewals: u32,
    },
    /// It belongs to this claim no more: whatever is done from now on may be done a second time by somebody else.
    #[error("the lease is lost")]
    Lost,
    /// The database did not say, and time is up. It may have been renewed; count on the old deadline.
    #[error("it is not known whether the lease was renewed: {0}")]
    Unknown(String),
}

/// The new deadline of a lease, by the engine's clock.
pub(super) type Answer = Result<Instant, ExtendError>;

/// Whose lease is to be renewed.
#[derive(Debug)]
pub(super) enum Lead {
    /// A row in hand: its run is renewed with it.
    Held(Arc<LeaseHandle>),
    /// A row that nobody here knows of: by the epoch given.
    Stranger { key: WorkKey, epoch: ClaimEpoch, until: Instant },
}

/// One wish for a renewal.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) lead: Lead,
    pub(super) asker: Option<oneshot::Sender<Answer>>,
    /// How many renewers died while they served it.
    pub(super) deaths: u32,
}

impl Request {
    pub(super) fn answer(self, answer: Answer) {
        if let Lead::Held(lease) = &self.lead {
            lease.dequeue();
        }
        if let Some(asker) = self.asker {
            // Whoever asked may have ended.
            let _ = asker.send(answer);
        }
    }
}

/// What has become of the renewals so far, whoever sent them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RenewalCounters {
    pub(crate) requests: u64,
    pub(crate) flushes: u64,
    pub(crate) failed_flushes: u64,
    pub(crate) renewed: u64,
    pub(crate) locked: u64,
    pub(crate) lost: u64,
    pub(crate) refused_at_cap: u64,
    pub(crate) skipped: u64,
    pub(crate) too_late: u64,
    pub(crate) strangers: u64,
    pub(crate) deadly: u64,
}

type Bell = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Request>,
    /// Not to be tried again before their time.
    later: Vec<(Instant, Request)>,
    in_flight: Option<(u64, Batch)>,
    bell: Option<Bell>,
    rung: bool,
    closed: bool,
    counters: RenewalCounters,
}

/// The renewals of one instance, and the terms of its leases. Shared by all incarnations of its renewer, one after the other.
pub struct Renewals {
    terms: LeaseTerms,
    capacity: usize,
    queue: Mutex<Queue>,
    room: Notify,
}

impl fmt::Debug for Renewals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewals").field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// A batch on its way to the store.
#[derive(Debug)]
pub(crate) struct RenewalFlush {
    /// Names it when its answer comes.
    pub(crate) number: u64,
    pub(crate) items: Vec<(WorkKey, ClaimEpoch)>,
}

/// For whoever asks.
impl Renewals {
    /// None yet. `capacity`: requests that may wait.
    pub fn new(terms: LeaseTerms, capacity: usize) -> Arc<Self> {
        let (queue, room) = (Mutex::default(), Notify::new());
        Arc::new(Self { terms, capacity: capacity.max(1), queue, room })
    }

    /// What leases are made of.
    pub fn terms(&self) -> LeaseTerms {
        self.terms
    }

    /// Asks for the renewal of these leases, as far as there is room. Whoever watches them asks again.
    pub(crate) fn offer(&self, leases: impl IntoIterator<Item = Arc<LeaseHandle>>) {
        {
            let queue = &mut *lock(&self.queue);
            for lease in leases {
                if queue.closed || queue.len() >= self.capacity {
                    break;
                }
                if lease.enqueue() {
                    queue.push(Request { lead: Lead::Held(lease), asker: None, deaths: 0 });
                }
            }
        }
        self.ring();
    }

    /// Renews this lease and its run.
    pub(super) async fn extend(&self, lease: Arc<LeaseHandle>) -> Result<tokio::time::Instant, ExtendError> {
        self.ask(Lead::Held(lease)).await
    }

    /// Renews a row that is not in hand here, if this instance leases it under this epoch.
    pub(crate) async fn extend_stranger(
        &self,
        key: WorkKey,
        epoch: ClaimEpoch,
    ) -> Result<tokio::time::Instant, ExtendError> {
        let until = crate::clock::now() + self.terms.grace.max(Duration::from_secs(1));
        self.ask(Lead::Stranger { key, epoch, until }).await
    }

    async fn ask(&self, lead: Lead) -> Result<tokio::time::Instant, ExtendError> {
        let (asker, answer) = oneshot::channel();
        let mut request = Some(Request { lead, asker: Some(asker), deaths: 0 });
        while request.is_some() {
            // Before one looks, so that no room that comes up meanwhile is missed.
            let room = self.room.notified();
            {
                let queue = &mut *lock(&self.queue);
                if queue.closed {
                    return Err(stopped());
                }
                if queue.len() < self.capacity {
                    request.take().into_iter().for_each(|request| queue.push(request));
                }
            }
            match &request {
                Some(_) => room.await,
                None => self.ring(),
            }
        }
        answer.await.unwrap_or_else(|_| Err(stopped())).map(crate::clock::as_timer)
    }

    fn ring(&self) {
        let bell = {
            let queue = &mut *lock(&self.queue);
            if queue.rung || queue.waiting.is_empty() {
                return;
            }
            queue.rung = true;
            queue.bell.clone()
        };
        if let Some(bell) = bell {
            bell();
        }
    }
}

/// For whoever renews.
impl Renewals {
    /// What to do from now on when something was asked for. Whoever sets it must look once.
    pub(crate) fn set_bell(&self, bell: impl Fn() + Send + Sync + 'static) {
        let bell: Bell = Arc::new(bell);
        let silent = lock(&self.queue).bell.replace(bell);
        drop(silent);
    }

    /// A new renewer begins. What its predecessor was sending comes first; it may have been carried out already, and is given up when
    /// renewer after renewer dies of it. Returns how many requests that were.
    pub(crate) fn take_over(&self) -> usize {
        let mut deadly = Vec::new();
        {
            let queue = &mut *lock(&self.queue);
            if let Some((_, batch)) = queue.in_flight.take() {
                for mut request in batch.into_requests().into_iter().rev() {
                    request.deaths += 1;
                    if request.deaths >= MAX_DEATHS {
                        deadly.push(request);
                    } else {
                        queue.waiting.push_front(request);
                    }
                }
                queue.counters.deadly += deadly.len() as u64;
            }
        }
        let given_up = deadly.len();
        let reason = "renewer after renewer died of it";
        for request in deadly {
            request.answer(Err(ExtendError::Unknown(reason.to_owned())));
        }
        given_up
    }

    /// How many requests wait at `now`. What is asked for after this rings again.
    pub(crate) fn waiting(&self, now: Instant) -> usize {
        let queue = &mut *lock(&self.queue);
        queue.rung = false;
        let (due, later) = std::mem::take(&mut queue.later).into_iter().partition(|(at, _)| *at <= now);
        queue.later = later;
        queue.waiting.extend(due.into_iter().map(|(_, request): (Instant, Request)| request));
        queue.waiting.len()
    }

    /// When the next of those comes up that must not be tried before.
    pub(crate) fn next_again(&self) -> Option<Instant> {
        lock(&self.queue).later.iter().map(|(at, _)| *at).min()
    }

    /// Begins to renew the oldest requests, for about `rows` rows; a run is never divided. `None`: none of those that waited is to be
    /// renewed any more.
    pub(crate) fn begin(&self, in_flight: &InFlight, rows: usize, now: Instant) -> Option<RenewalFlush> {
        let taken: Vec<Request> = {
            let queue = &mut *lock(&self.queue);
            let taken = queue.waiting.len().min(rows);
            queue.waiting.drain(..taken).collect()
        };
        let Sorted { batch, left, refused } = Batch::sort(taken, in_flight, rows, now);
        let flush = {
            let queue = &mut *lock(&self.queue);
            for request in left.into_iter().rev() {
                queue.waiting.push_front(request);
            }
            for (_, why) in &refused {
                *queue.counters.of(*why) += 1;
            }
            let items = batch.items();
            (!items.is_empty()).then(|| {
                queue.counters.flushes += 1;
                queue.counters.strangers += batch.strangers();
                let number = queue.counters.flushes;
                queue.in_flight = Some((number, batch));
                RenewalFlush { number, items }
            })
        };
        for (request, why) in refused {
            request.answer(Err(why.into_error(self.terms)));
        }
        self.room.notify_waiters();
        flush
    }

    /// Whether a batch is on its way.
    pub(crate) fn is_flushing(&self) -> bool {
        lock(&self.queue).in_flight.is_some()
    }

    /// The database has answered a batch that was sent at `sent_at`. Returns how many leases are lost.
    pub(crate) fn answered(
        &self,
        number: u64,
        sent_at: Instant,
        answers: &[Renewal],
        now: Instant,
        pause: Duration,
    ) -> u64 {
        let Some(batch) = self.end(number) else { return 0 };
        let judged = batch.judge(answers, sent_at, now, self.terms);
        {
            let queue = &mut *lock(&self.queue);
            queue.counters.renewed += judged.renewed;
            queue.counters.locked += judged.locked;
            queue.counters.lost += judged.lost;
            queue.later.extend(judged.again.into_iter().map(|request| (now + pause, request)));
        }
        for (request, answer) in judged.answered {
            request.answer(answer);
        }
        self.room.notify_waiters();
        judged.lost
    }

    /// Nothing is known of a batch: its requests come first again, and what was reserved for them is given back.
    pub(crate) fn failed(&self, number: u64) {
        let Some(batch) = self.end(number) else { return };
        let requests = batch.into_requests();
        let queue = &mut *lock(&self.queue);
        queue.counters.failed_flushes += 1;
        for request in requests.into_iter().rev() {
            queue.waiting.push_front(request);
        }
    }

    fn end(&self, number: u64) -> Option<Batch> {
        let queue = &mut *lock(&self.queue);
        queue.in_flight.take_if(|(current, _)| *current == number).map(|(_, batch)| batch)
    }

    /// Nothing is renewed any more: whoever waits is told, and whoever asks.
    pub(crate) fn close(&self) {
        let (waiting, later, in_flight) = {
            let queue = &mut *lock(&self.queue);
            queue.closed = true;
            (std::mem::take(&mut queue.waiting), std::mem::take(&mut queue.later), queue.in_flight.take())
        };
        let later = later.into_iter().map(|(_, request)| request);
        let flying = in_flight.into_iter().flat_map(|(_, batch)| batch.into_requests());
        for request in waiting.into_iter().chain(later).chain(flying) {
            request.answer(Err(stopped()));
        }
        self.room.notify_waiters();
    }

    /// Whether nothing is renewed any more.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }

    pub(crate) fn counters(&self) -> RenewalCounters {
        lock(&self.queue).counters
    }
}

impl Queue {
    fn len(&self) -> usize {
        self.waiting.len() + self.later.len()
    }

    fn push(&mut self, request: Request) {
        self.counters.requests += 1;
        self.waiting.push_back(request);
    }
}

/// Why a request is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    AtCap,
    /// The row is in nobody's hand any more, or its handler was told to stop.
    Over,
    /// Its deadline has passed.
    TooLate,
}

impl RenewalCounters {
    fn of(&mut self, why: Refused) -> &mut u64 {
        match why {
            Refused::AtCap => &mut self.refused_at_cap,
            Refused::Over => &mut self.skipped,
            Refused::TooLate => &mut self.too_late,
        }
    }
}

impl Refused {
    fn into_error(self, terms: LeaseTerms) -> ExtendError {
        match self {
            Self::AtCap => ExtendError::AtCap { renewals: terms.max_renewals },
            Self::Over => ExtendError::Lost,
            Self::TooLate => ExtendError::Unknown("the deadline has passed".to_owned()),
        }
    }
}

fn stopped() -> ExtendError {
    ExtendError::Unknown("renewing has stopped".to_owned())
}
