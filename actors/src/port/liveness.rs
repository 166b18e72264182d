//! What the engine needs from a database to be known alive, to notice the dead, and to keep its leases.
//!
//! The rule: the database clock and the database's locks decide who is alive; a port hands out proofs and verdicts, never guesses. The
//! failure this prevents: an instance that judges a peer, or itself, by its own clock or by a lock that a pooler's session holds.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use tokio::sync::mpsc;

use super::PortFuture;
use crate::instance::InstanceId;
use crate::work::{ClaimEpoch, WorkKey};

/// Opens direct sessions; an engine has one at a time.
pub trait DirectConnector: Send + Sync + 'static {
    /// Opens one, and proves that it leads to the server itself. [`StoreError::NotDirect`](super::StoreError::NotDirect): a pooler
    /// answered; asking again helps only after somebody changed the URL.
    fn connect(&self) -> PortFuture<'_, (Box<dyn DirectSession>, NotificationStream)>;
}

/// A session that is known to lead to the server itself, not to a pooler: it can hold the alive-lock and hear notifications.
///
/// Calls may be made side by side and dropped at any time. A call that is not answered in time ends the session, and so does dropping it;
/// the end of a session, however it comes about, is the end of its [`NotificationStream`], and its locks are free when the server notices.
pub trait DirectSession: Send + Sync + 'static {
    /// Takes the alive-lock for this session, without waiting; true as well when it is already held here. False: another session has it
    /// (the half-open one of the same process, or a watcher for an instant): ask again.
    fn claim_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool>;

    /// Gives the alive-lock back. False: this session did not hold it.
    fn release_alive_lock(&self, instance: InstanceId) -> PortFuture<'_, bool>;

    /// Hears these channels as well, from now on. Asking twice for one changes nothing.
    fn listen(&self, channels: Vec<String>) -> PortFuture<'_, ()>;

    /// Hears these channels no more. Asking for one that is not listened to changes nothing.
    fn unlisten(&self, channels: Vec<String>) -> PortFuture<'_, ()>;

    /// Rings a channel. When this session listens to it too, it hears its own ring, marked as such.
    fn notify(&self, channel: String, payload: String) -> PortFuture<'_, ()>;

    /// One cheap round trip, which proves the session, and so its locks, at the moment the ping was sent.
    fn ping(&self) -> PortFuture<'_, ()>;

    /// The channel on which producers and peers ring this instance, as the schema names it.
    fn work_channel(&self, instance: InstanceId) -> PortFuture<'_, String>;
}

/// One ring of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The channel.
    pub channel: String,
    /// What was sent along.
    pub payload: String,
    /// Sent by this very session.
    pub own: bool,
}

/// The notifications of one session, in the order in which they were committed.
///
/// Independent of the session's calls, and cancel-safe: nothing is lost between two calls of [`recv`](Self::recv). Nothing is dropped
/// either, so whoever holds it has to read it.
#[derive(Debug)]
pub struct NotificationStream(mpsc::UnboundedReceiver<Notification>);

impl NotificationStream {
    /// A stream, and the end to feed it by. It ends when the sender is dropped.
    pub fn channel() -> (NotificationSender, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (NotificationSender(sender), Self(receiver))
    }

    /// The next one, however long it takes; `None` once the session has ended.
    pub async fn recv(&mut self) -> Option<Notification> {
        self.0.recv().await
    }
}

impl Stream for NotificationStream {
    type Item = Notification;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Notification>> {
        self.0.poll_recv(cx)
    }
}

/// Feeds a [`NotificationStream`]; for implementations of [`DirectConnector`].
#[derive(Debug)]
pub struct NotificationSender(mpsc::UnboundedSender<Notification>);

impl NotificationSender {
    /// Hands one over. False: nobody listens any more.
    pub fn send(&self, notification: Notification) -> bool {
        self.0.send(notification).is_ok()
    }
}

/// An instant by the database clock. Opaque: it is only ever handed back to the database that named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DatabaseTime(pub i64);

/// A peer whose alive-lock is free although its last beat said that it holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// Who.
    pub peer: InstanceId,
    /// When the lock was seen free.
    pub since: DatabaseTime,
}

/// What became of a suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuspectVerdict {
    /// The grace is not over, or the peer's row is busy: ask again.
    Early,
    /// It holds its lock again.
    Alive,
    /// It has beaten since, or its last beat declared no lock, or it is no member any more: leave it.
    Beaten,
    /// It is a member no longer: from now on every write of it is refused, and its rows wait for
    /// [`SweepStore::release_pass`].
    Evicted,
}

/// Learns of deaths within milliseconds, by waiting for the alive-lock of a peer.
///
/// One call at a time: a second one waits for the first. A call may be dropped; the next one opens a new session.
pub trait DeathWatch: Send + Sync + 'static {
    /// Waits until the peer that `me` watches loses its lock, at most for `wait`. With `census`, looks first for members without their
    /// lock whom nobody watches (a watcher that died with its peer); ask for it only after the own lock was held for a while, since a
    /// restart of the server frees every lock at once.
    fn watch(&self, me: InstanceId, wait: Duration, census: bool) -> PortFuture<'_, Option<Suspect>>;

    /// The verdict on a suspect, `grace` after it was first seen. Never waits for the grace itself.
    fn evict_suspect(
        &self,
        me: InstanceId,
        suspect: Suspect,
        grace: Duration,
    ) -> PortFuture<'_, SuspectVerdict>;
}

/// What a sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Who was evicted.
    pub evicted: Vec<InstanceId>,
    /// Rows that came back, assignments of streams included.
    pub released: u64,
    /// Some evicted instance's rows are not all back: go on with [`SweepStore::release_pass`].
    pub unfinished: bool,
}

/// The backstop: finds what every other way missed, and hands back what the evicted held.
pub trait SweepStore: Send + Sync + 'static {
    /// Evicts the peers whose beat is stale and whose lock is free, never `me`. `None`: another instance is at it. One statement and a
    /// tiny transaction; only when there is something to hand back, a first [`release_pass`](Self::release_pass) follows it.
    fn sweep(&self, me: InstanceId) -> PortFuture<'_, Option<Swept>>;

    /// One pass over what evicted instances still hold, over `max_rows` rows (1 to 1 000) at most. Returns the rows that came back,
    /// assignments of streams included, and whether something is left to do. Anyone may go on where another one stopped. Nothing back and something left: somebody has those
    /// rows locked or works on them; ask again later, not at once.
    fn release_pass(&self, max_rows: u32) -> PortFuture<'_, (u64, bool)>;
}

/// What became of the renewal of one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// It ends one lease length after the call.
    Renewed,
    /// Unchanged: somebody has the row, or a row of its run before it, locked. Ask again.
    Locked,
    /// Not this claim's any more: stop.
    Lost,
}

/// Keeps leases.
pub trait RenewalStore: Send + Sync + 'static {
    /// Renews leases, fenced row by row, in one transaction; all get one expiry. The answer is in the order of `items`.
    ///
    /// Rows of a run go together: a row is [`Locked`](Renewal::Locked) as long as a leased row of its order key before it is not among the
    /// items, because it must not outlive that one. At most 1 000 items, so that no statement is longer.
    fn renew(
        &self,
        instance: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        lease: Duration,
    ) -> PortFuture<'_, Vec<Renewal>>;
}
