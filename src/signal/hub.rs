//! Between the one session that listens and the many streams that read.
//!
//! The rule: the first stream of a channel asks for it, the last one that goes lets it go, and both are said in the order in which they
//! happened, whoever is restarted meanwhile. What a stream has not read yet is bounded. The failures this prevents: a channel that is
//! listened to for ever for nobody, one that is let go while somebody reads, and memory that grows with the slowest reader.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Waker};

use actix::prelude::*;
use workpump_actors::message::{Heard, Subscribe, Unsubscribe};
use workpump_actors::registry::Spec;

/// Signals that may wait between the session and the streams. Beyond that they are dropped, and every stream of their topic is told
/// [`Heard::Listening`] again.
const BURST: usize = 4_096;

/// What is told to a stream, not yet read as its type.
#[derive(Debug)]
pub(crate) enum Told {
    Heard(Heard),
    Missed(u64),
}

/// Knows who reads which channel. Belongs to the pump and outlives the actors.
#[derive(Debug, Default)]
pub(crate) struct Hub {
    wiring: OnceLock<Wiring>,
    readers: Mutex<Readers>,
}

#[derive(Debug)]
struct Wiring {
    subscribe: Recipient<Subscribe>,
    unsubscribe: Recipient<Unsubscribe>,
    me: Recipient<Heard>,
}

#[derive(Debug, Default)]
struct Readers {
    /// The tree has ended: nothing will be heard any more.
    closed: bool,
    channels: HashMap<Arc<str>, Channel>,
}

#[derive(Debug, Default)]
struct Channel {
    /// Whether it is known to be listened to, so that who comes later can be told so.
    listening: bool,
    ears: Vec<Arc<Ear>>,
}

impl Hub {
    /// Says whom to ask for channels, and who hears them. Nothing can be heard before.
    pub(crate) fn connect(
        &self,
        subscribe: Recipient<Subscribe>,
        unsubscribe: Recipient<Unsubscribe>,
        me: Recipient<Heard>,
    ) {
        // Set once, by the start of the pump.
        let _ = self.wiring.set(Wiring { subscribe, unsubscribe, me });
    }

    /// A new reader of this channel.
    pub(crate) fn join(&self, channel: Arc<str>) -> Arc<Ear> {
        let ear = Arc::new(Ear { channel: Arc::clone(&channel), heard: Mutex::default() });
        let mut readers = lock(&self.readers);
        if readers.closed {
            lock(&ear.heard).closed = true;
            return ear;
        }
        let known = readers.channels.entry(Arc::clone(&channel)).or_default();
        known.ears.push(Arc::clone(&ear));
        if known.listening {
            // Should the session be lost at this moment, it is told again, as everybody else is.
            ear.push(Heard::Listening { channel });
        } else if let (1, Some(wiring)) = (known.ears.len(), self.wiring.get()) {
            // Under the lock, so that nobody's goodbye overtakes it.
            wiring.subscribe.do_send(Subscribe { channel, to: wiring.me.clone() });
        }
        ear
    }

    /// A reader goes.
    pub(crate) fn leave(&self, ear: &Arc<Ear>) {
        let mut readers = lock(&self.readers);
        let Some(known) = readers.channels.get_mut(&ear.channel) else { return };
        known.ears.retain(|other| !Arc::ptr_eq(other, ear));
        if known.ears.is_empty() {
            readers.channels.remove(&ear.channel);
            if let Some(wiring) = self.wiring.get() {
                let channel = Arc::clone(&ear.channel);
                wiring.unsubscribe.do_send(Unsubscribe { channel, to: wiring.me.clone() });
            }
        }
    }

    fn heard(&self, heard: &Heard) {
        let (channel, listening) = match heard {
            Heard::Listening { channel } => (channel, true),
            Heard::Rung { channel, .. } => (channel, false),
        };
        let mut readers = lock(&self.readers);
        // Whatever comes for a channel that was let go meanwhile is for nobody.
        let Some(known) = readers.channels.get_mut(channel) else { return };
        known.listening |= listening;
        let woken: Vec<Waker> = known.ears.iter().filter_map(|ear| ear.push(heard.clone())).collect();
        drop(readers);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Says [`Heard::Listening`] again to all who were told so: whatever was being passed on at this moment may be lost.
    fn look_again(&self) {
        let channels: Vec<Arc<str>> = lock(&self.readers)
            .channels
            .iter()
            .filter(|(_, known)| known.listening)
            .map(|(channel, _)| Arc::clone(channel))
            .collect();
        for channel in channels {
            self.heard(&Heard::Listening { channel });
        }
    }

    /// Ends every stream, now and later.
    fn close(&self) {
        let mut readers = lock(&self.readers);
        readers.closed = true;
        let ears = readers.channels.drain().flat_map(|(_, known)| known.ears);
        let woken: Vec<Waker> = ears.filter_map(|ear| ear.close()).collect();
        drop(readers);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// What one stream has not read yet.
#[derive(Debug)]
pub(crate) struct Ear {
    channel: Arc<str>,
    heard: Mutex<Unread>,
}

/// How much a stream may leave unread, unless it says otherwise.
const KEEP: usize = 1_024;

#[derive(Debug)]
struct Unread {
    queue: VecDeque<Heard>,
    keep: usize,
    /// Thrown away since the last one that was read.
    missed: u64,
    closed: bool,
    reader: Option<Waker>,
}

impl Default for Unread {
    fn default() -> Self {
        Self { queue: VecDeque::new(), keep: KEEP, missed: 0, closed: false, reader: None }
    }
}

impl Unread {
    /// A `Listening` counts too: what stands in its place says the same, look at the state.
    fn shrink(&mut self) {
        while self.queue.len() > self.keep {
            self.queue.pop_front();
            self.missed += 1;
        }
    }
}

impl Ear {
    fn push(&self, heard: Heard) -> Option<Waker> {
        let mut unread = lock(&self.heard);
        unread.queue.push_back(heard);
        unread.shrink();
        unread.reader.take()
    }

    fn close(&self) -> Option<Waker> {
        let mut unread = lock(&self.heard);
        unread.closed = true;
        unread.reader.take()
    }

    /// From now on at most so many, one at least.
    pub(crate) fn keep(&self, signals: usize) {
        let mut unread = lock(&self.heard);
        unread.keep = signals.max(1);
        unread.shrink();
    }

    /// The next one. What was missed comes first: it is older than all that is kept.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Option<Told>> {
        let mut unread = lock(&self.heard);
        if unread.missed > 0 {
            return Poll::Ready(Some(Told::Missed(std::mem::take(&mut unread.missed))));
        }
        match unread.queue.pop_front() {
            Some(heard) => Poll::Ready(Some(Told::Heard(heard))),
            None if unread.closed => Poll::Ready(None),
            None => {
                unread.reader = Some(waker.clone());
                Poll::Pending
            }
        }
    }
}

/// Hears for all streams of a pump. Has nothing of its own: whatever it knows is in the hub.
pub(crate) struct HubActor(Arc<Hub>);

impl HubActor {
    /// Its spec. When the tree lets it go for good, every stream ends.
    pub(crate) fn spec(hub: &Arc<Hub>) -> Spec<Self> {
        let last = Last(Arc::clone(hub));
        Spec::with_mailbox("signal_hub", BURST, move |cx| {
            if cx.generation() > 1 {
                last.0.look_again();
            }
            Self(Arc::clone(&last.0))
        })
    }
}

impl Actor for HubActor {
    type Context = Context<Self>;
}

impl Handler<Heard> for HubActor {
    type Result = ();

    fn handle(&mut self, heard: Heard, _: &mut Self::Context) {
        self.0.heard(&heard);
    }
}

/// Dropped when no further life can be made.
struct Last(Arc<Hub>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What a panic of somebody else left is still in order: nothing is ever half done under these locks.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rung(channel: &str, payload: &str) -> Heard {
        Heard::Rung { channel: channel.into(), payload: payload.into() }
    }

    fn listening(channel: &str) -> Heard {
        Heard::Listening { channel: channel.into() }
    }

    /// Everything that can be read now, and whether it is the end.
    fn read(ear: &Ear) -> (Vec<String>, bool) {
        let mut all = Vec::new();
        loop {
            match ear.poll(Waker::noop()) {
                Poll::Ready(Some(Told::Missed(count))) => all.push(format!("missed {count}")),
                Poll::Ready(Some(Told::Heard(Heard::Listening { .. }))) => all.push("listening".to_owned()),
                Poll::Ready(Some(Told::Heard(Heard::Rung { payload, .. }))) => all.push(payload.to_string()),
                Poll::Ready(None) => return (all, true),
                Poll::Pending => return (all, false),
            }
        }
    }

    #[test]
    fn a_listening_that_is_thrown_away_is_missed_too() {
        let hub = Hub::default();
        let ear = hub.join("a".into());
        ear.keep(2);
        hub.heard(&rung("a", "1"));
        hub.heard(&listening("a"));
        hub.heard(&rung("a", "2"));
        assert_eq!(read(&ear), (vec!["missed 1".into(), "listening".into(), "2".into()], false));
        hub.heard(&listening("a"));
        hub.heard(&rung("a", "3"));
        hub.heard(&rung("a", "4"));
        assert_eq!(read(&ear), (vec!["missed 1".into(), "3".into(), "4".into()], false));
    }

    #[test]
    fn who_joins_later_is_told_at_once_and_who_joins_a_channel_that_was_let_go_is_not() {
        let hub = Hub::default();
        let first = hub.join("a".into());
        hub.heard(&listening("a"));
        let second = hub.join("a".into());
        assert_eq!(read(&second).0, ["listening"]);
        hub.leave(&first);
        hub.heard(&rung("a", "1"));
        assert_eq!((read(&first).0, read(&second).0), (vec!["listening".to_owned()], vec!["1".to_owned()]));
        hub.leave(&second);
        hub.heard(&listening("a"));
        assert!(read(&hub.join("a".into())).0.is_empty(), "that was the answer to somebody who has gone");
    }

    #[test]
    fn only_channels_that_are_listened_to_are_told_to_look_again() {
        let hub = Hub::default();
        let (heard, waiting) = (hub.join("a".into()), hub.join("b".into()));
        hub.heard(&listening("a"));
        hub.look_again();
        assert_eq!(read(&heard).0, ["listening", "listening"]);
        assert!(read(&waiting).0.is_empty());
    }

    #[test]
    fn what_was_heard_before_the_end_is_read_and_nothing_begins_after_it() {
        let hub = Arc::new(Hub::default());
        let spec = HubActor::spec(&hub);
        let ear = hub.join("a".into());
        hub.heard(&rung("a", "1"));
        assert_eq!(read(&ear), (vec!["1".into()], false));
        hub.heard(&rung("a", "2"));
        drop(spec);
        assert_eq!(read(&ear), (vec!["2".into()], true));
        assert_eq!(read(&hub.join("a".into())), (vec![], true));
    }
}
