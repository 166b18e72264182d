//! What a subscriber reads.
//!
//! The rule: a value is read as its type where it is used, not where it is heard. The failure this prevents: a `Deserialize` of a user's
//! that panics and takes the subscriptions of everybody with it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::Stream;
use serde::de::DeserializeOwned;

use super::hub::{Ear, Hub, Told};
use super::{Signal, Topic};

/// The signals of one topic, in the order in which they were committed. Made by [`WorkPump::subscribe`](crate::WorkPump::subscribe);
/// dropping it unsubscribes.
///
/// It begins with [`Signal::Listening`] as soon as the topic is listened to, and ends when the pump does. It goes on over restarts of the
/// pump's actors, lost sessions and evictions of the instance; after each of them it says [`Signal::Listening`] again.
#[must_use = "signals that nobody reads are thrown away"]
pub struct Signals<T> {
    topic: Topic<T>,
    hub: Arc<Hub>,
    ear: Arc<Ear>,
}

impl<T> Signals<T> {
    pub(crate) fn new(topic: &Topic<T>, hub: &Arc<Hub>, channel: Arc<str>) -> Self {
        Self { topic: topic.clone(), hub: Arc::clone(hub), ear: hub.join(channel) }
    }

    /// Keep at most so many signals that were not read yet; 0 counts as 1. Beyond that the oldest are thrown away, and
    /// [`Signal::Missed`] stands in their place. Default 1 024; one takes up to 8 kB.
    pub fn keep(self, signals: usize) -> Self {
        self.ear.keep(signals);
        self
    }

    /// What they are about.
    pub fn topic(&self) -> &Topic<T> {
        &self.topic
    }
}

impl<T: DeserializeOwned> Signals<T> {
    /// The next one, however long it takes; `None` once the pump has ended. Nothing is lost when the future is dropped.
    pub async fn recv(&mut self) -> Option<Signal<T>> {
        std::future::poll_fn(|cx| self.poll_signal(cx)).await
    }

    fn poll_signal(&mut self, cx: &mut Context<'_>) -> Poll<Option<Signal<T>>> {
        self.ear.poll(cx.waker()).map(|told| {
            told.map(|told| match told {
                Told::Heard(heard) => heard.into(),
                Told::Missed(signals) => Signal::Missed { signals },
            })
        })
    }
}

impl<T: DeserializeOwned> Stream for Signals<T> {
    type Item = Signal<T>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_signal(cx)
    }
}

impl<T> Drop for Signals<T> {
    fn drop(&mut self) {
        self.hub.leave(&self.ear);
    }
}

impl<T> fmt::Debug for Signals<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signals").field("topic", &self.topic.name).finish_non_exhaustive()
    }
}
