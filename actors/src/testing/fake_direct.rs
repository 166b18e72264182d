//! A direct session in memory: its lock, its notifications and its end are driven by the test.
//!
//! Each connect makes a new session; what an earlier one held or heard is gone with it, as on a server.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::fake::Reply;
use crate::instance::InstanceId;
use crate::lock;
use crate::port::{
    DirectConnector, DirectSession, Notification, NotificationSender, NotificationStream, PortFuture,
    ProducersRoute, StoreError,
};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirectOp {
    /// `connect`
    Connect,
    /// `claim_alive_lock`
    ClaimLock,
    /// `release_alive_lock`
    ReleaseLock,
    /// `listen`
    Listen,
    /// `unlisten`
    Unlisten,
    /// `notify`
    Notify,
    /// `ping`
    Ping,
    /// `work_channel`
    WorkChannel,
    /// `ring`, of the producers' route
    Ring,
}

type Always = Box<dyn Fn(DirectOp) -> Option<Reply> + Send>;

/// The session that is open now.
struct Open {
    number: usize,
    heard: NotificationSender,
    channels: BTreeSet<String>,
    locks: BTreeSet<InstanceId>,
}

#[derive(Default)]
struct State {
    sessions: usize,
    open: Option<Open>,
    /// Locks that somebody else holds.
    taken: BTreeSet<InstanceId>,
    script: HashMap<DirectOp, VecDeque<Reply>>,
    always: Option<Always>,
    log: Vec<(Duration, DirectOp)>,
    /// What was asked for in calls of `listen` and `unlisten`.
    asked: Vec<(DirectOp, Vec<String>)>,
    /// Channels that no session may listen to.
    refused: BTreeSet<String>,
    /// Nothing that is rung is delivered.
    deaf: bool,
    sent: Vec<(String, String)>,
}

struct Shared {
    state: Mutex<State>,
    origin: Instant,
    called: Notify,
}

/// A connector whose sessions do as the test says.
#[derive(Clone)]
pub struct FakeDirect(Arc<Shared>);

impl std::fmt::Debug for FakeDirect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeDirect").finish_non_exhaustive()
    }
}

impl Default for FakeDirect {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeDirect {
    /// A server that answers at once, and on which nobody holds a lock.
    pub fn new() -> Self {
        let (state, called) = (Mutex::default(), Notify::new());
        Self(Arc::new(Shared { state, origin: Instant::now(), called }))
    }

    /// Answers the next unscripted call of this kind so.
    pub fn script(&self, op: DirectOp, reply: Reply) {
        lock(&self.0.state).script.entry(op).or_default().push_back(reply);
    }

    /// Answers every call that no script waits for by this; `None` from the closure means as a server would.
    pub fn always(&self, reply: impl Fn(DirectOp) -> Option<Reply> + Send + 'static) {
        lock(&self.0.state).always = Some(Box::new(reply));
    }

    /// Answers as a server would again.
    pub fn recover(&self) {
        lock(&self.0.state).always = None;
    }

    /// Somebody else holds this lock: the half-open session of an earlier connection, for one.
    pub fn take_lock(&self, instance: InstanceId) {
        lock(&self.0.state).taken.insert(instance);
    }

    /// Somebody else gives it up.
    pub fn free_lock(&self, instance: InstanceId) {
        lock(&self.0.state).taken.remove(&instance);
    }

    /// Whether the open session holds this lock.
    pub fn holds_lock(&self, instance: InstanceId) -> bool {
        lock(&self.0.state).open.as_ref().is_some_and(|open| open.locks.contains(&instance))
    }

    /// Whether a session is open.
    pub fn is_connected(&self) -> bool {
        lock(&self.0.state).open.is_some()
    }

    /// How many sessions were opened so far.
    pub fn sessions(&self) -> usize {
        lock(&self.0.state).sessions
    }

    /// What the open session listens to.
    pub fn channels(&self) -> Vec<String> {
        lock(&self.0.state).open.iter().flat_map(|open| open.channels.iter().cloned()).collect()
    }

    /// What each call of this kind asked for: `Listen` or `Unlisten`.
    pub fn asked(&self, op: DirectOp) -> Vec<Vec<String>> {
        let state = lock(&self.0.state);
        state.asked.iter().filter(|(of, _)| *of == op).map(|(_, channels)| channels.clone()).collect()
    }

    /// Whether the server refuses every statement that would listen to this channel.
    pub fn set_refused(&self, channel: &str, refused: bool) {
        let mut state = lock(&self.0.state);
        if refused {
            state.refused.insert(channel.to_owned())
        } else {
            state.refused.remove(channel)
        };
    }

    /// Whether nothing is delivered any more, although everything is accepted: as behind a pooler, or in another database.
    pub fn set_deaf(&self, deaf: bool) {
        lock(&self.0.state).deaf = deaf;
    }

    /// Somebody else rings a channel. False: no open session listens to it.
    pub fn ring(&self, channel: &str, payload: &str) -> bool {
        lock(&self.0.state).deliver(channel, payload, false)
    }

    /// The open session ends: its stream ends, its locks are free, and every later call on it fails.
    pub fn end_session(&self) {
        lock(&self.0.state).open = None;
    }

    /// Everything that sessions and producers rang, as channel and payload.
    pub fn sent(&self) -> Vec<(String, String)> {
        lock(&self.0.state).sent.clone()
    }

    /// When calls of this kind were made, since this was made.
    pub fn times(&self, op: DirectOp) -> Vec<Duration> {
        lock(&self.0.state).log.iter().filter(|(_, made)| *made == op).map(|(at, _)| *at).collect()
    }

    /// How many calls of this kind were made.
    pub fn count(&self, op: DirectOp) -> usize {
        self.times(op).len()
    }

    /// Waits until so many calls of this kind were made.
    pub async fn called(&self, op: DirectOp, times: usize) {
        loop {
            let called = self.0.called.notified();
            if self.count(op) >= times {
                return;
            }
            called.await;
        }
    }

    /// The channel of an instance, as this server names it.
    pub fn channel_of(instance: InstanceId) -> String {
        format!("wh_work_{instance}")
    }
}

impl Shared {
    /// Notes a call and answers it by script, or by `act`.
    async fn answer<T>(
        &self,
        op: DirectOp,
        act: impl FnOnce(&mut State) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let reply = {
            let mut state = lock(&self.state);
            state.log.push((self.origin.elapsed(), op));
            let scripted = state.script.get_mut(&op).and_then(VecDeque::pop_front);
            scripted.or_else(|| state.always.as_ref().and_then(|always| always(op)))
        };
        self.called.notify_waiters();
        match reply {
            None => act(&mut lock(&self.state)),
            Some(Reply::Slow(delay)) => {
                tokio::time::sleep(delay).await;
                act(&mut lock(&self.state))
            }
            Some(Reply::Late(delay)) => {
                let done = act(&mut lock(&self.state));
                tokio::time::sleep(delay).await;
                done
            }
            Some(Reply::Fail(error)) => Err(error),
            Some(Reply::Lose(error)) => act(&mut lock(&self.state)).and(Err(error)),
            Some(Reply::Hang) => std::future::pending().await,
        }
    }
}

impl State {
    fn deliver(&mut self, channel: &str, payload: &str, own: bool) -> bool {
        let (channel, payload) = (channel.to_owned(), payload.to_owned());
        self.open
            .as_ref()
            .filter(|open| !self.deaf && open.channels.contains(&channel))
            .is_some_and(|open| open.heard.send(Notification { channel, payload, own }))
    }

    /// The session of that number, unless it has ended.
    fn session(&mut self, number: usize) -> Result<&mut Open, StoreError> {
        let open = self.open.as_mut().filter(|open| open.number == number);
        open.ok_or_else(|| StoreError::Unavailable("the session has ended".to_owned()))
    }
}

impl DirectConnector for FakeDirect {
    fn connect(&self) -> PortFuture<'_, (Box<dyn DirectSession>, NotificationStream)> {
        let shared = Arc::clone(&self.0);
        Box::pin(self.0.answer(DirectOp::Connect, move |state| {
            let (heard, notifications) = NotificationStream::channel();
            state.sessions += 1;
            let number = state.sessions;
            let (channels, locks) = (BTreeSet::new(), BTreeSet::new());
            state.open = Some(Open { number, heard, channels, locks });
            Ok((Box::new(FakeSession { number, shared }) as Box<dyn DirectSession>, notifications))
        }))
    }
}

/// The way of producers to the same server.
impl ProducersRoute for FakeDirect {
    fn ring(&self, channel: String, payload: String) -> PortFuture<'_, ()> {
        Box::pin(self.0.answer(DirectOp::Ring, move |state| {
            state.deliver(&channel, &payload, false);
            state.sent.push((channel, payload));
            Ok(())
        }))
    }
}

/// One session; dropping it ends it.
struct FakeSession {
    number: usize,
    shared: Arc<Shared>,
}

impl Drop for FakeSession {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        if state.session(self.number).is_ok() {
            state.open = None;
        }
    }
}

impl DirectSession for FakeSession {
    fn claim_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool> {
        Box::pin(self.shared.answer(DirectOp::ClaimLock, move |state| {
            let taken = state.taken.contains(&instance);
            let open = state.session(self.number)?;
            if !taken {
                open.locks.insert(instance);
            }
            Ok(!taken)
        }))
    }

    fn release_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool> {
        Box::pin(self.shared.answer(DirectOp::ReleaseLock, move |state| {
            Ok(state.session(self.number)?.locks.remove(&instance))
        }))
    }

    fn listen(&self, channels: Vec<String>) -> PortFuture<'_, ()> {
        lock(&self.shared.state).asked.push((DirectOp::Listen, channels.clone()));
        Box::pin(self.shared.answer(DirectOp::Listen, move |state| {
            if let Some(bad) = channels.iter().find(|channel| state.refused.contains(*channel)) {
                let message = format!("channel {bad} is refused");
                return Err(StoreError::Other { code: "42501".to_owned(), message });
            }
            state.session(self.number)?.channels.extend(channels);
            Ok(())
        }))
    }

    fn unlisten(&self, channels: Vec<String>) -> PortFuture<'_, ()> {
        lock(&self.shared.state).asked.push((DirectOp::Unlisten, channels.clone()));
        Box::pin(self.shared.answer(DirectOp::Unlisten, move |state| {
            state.session(self.number)?.channels.retain(|channel| !channels.contains(channel));
            Ok(())
        }))
    }

    fn notify(&self, channel: String, payload: String) -> PortFuture<'_, ()> {
        Box::pin(self.shared.answer(DirectOp::Notify, move |state| {
            state.session(self.number)?;
            state.deliver(&channel, &payload, true);
            state.sent.push((channel, payload));
            Ok(())
        }))
    }

    fn ping(&self) -> PortFuture<'_, ()> {
        Box::pin(self.shared.answer(DirectOp::Ping, move |state| state.session(self.number).map(drop)))
    }

    fn work_channel(&self, instance: InstanceId) -> PortFuture<'_, String> {
        Box::pin(self.shared.answer(DirectOp::WorkChannel, move |state| {
            state.session(self.number).map(|_| FakeDirect::channel_of(instance))
        }))
    }
}
