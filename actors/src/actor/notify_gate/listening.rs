//! Which channels the open session listens to.
//!
//! The rule: one statement at a time, made from what is wanted and what is there at that moment; whatever changes meanwhile is looked at
//! when it has been answered. So the first subscriber of a channel is one LISTEN, the last one that leaves is one UNLISTEN, and whoever
//! comes and goes between two answers costs nothing. A channel that the server refuses rests for a second and holds up no other. The
//! failures this prevents: a LISTEN for each of a hundred subscribers, and one bad name after which nobody hears anything.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;

use super::NotifyGateActor;
use super::channels::Told;
use crate::message::{Subscribe, SubscribeError, Unsubscribe};
use crate::port::StoreError;

/// Channels of one statement at most.
const TOGETHER: usize = 500;

/// How long a channel rests that was refused.
const REST: Duration = Duration::from_secs(1);

/// How long a subscriber is left alone whose mailbox was full.
const FULL: Duration = Duration::from_millis(100);

/// Where a session stands.
#[derive(Debug, Default)]
pub(super) struct Listening {
    /// The instance's own channel, once it is listened to. Nothing else is before.
    pub(super) work: Option<Arc<str>>,
    /// Acknowledged.
    pub(super) acknowledged: BTreeSet<Arc<str>>,
    /// Asked for, and so perhaps listened to: whatever is not wanted any more has to be given up.
    asked: BTreeSet<Arc<str>>,
    /// Refused a moment ago.
    resting: BTreeSet<Arc<str>>,
    busy: bool,
    /// One channel at a time: a statement for many was refused, and one of them is to blame.
    singly: bool,
    /// Everything was asked for once.
    pub(super) complete: bool,
}

impl Listening {
    fn missing(&self, wanted: &BTreeSet<Arc<str>>) -> Vec<Arc<str>> {
        let most = if self.singly { 1 } else { TOGETHER };
        let missing = wanted.difference(&self.acknowledged).filter(|name| !self.resting.contains(*name));
        missing.take(most).cloned().collect()
    }

    fn surplus(&self, wanted: &BTreeSet<Arc<str>>) -> Vec<Arc<str>> {
        let surplus = self.asked.difference(wanted).filter(|name| !self.resting.contains(*name));
        surplus.filter(|name| self.work.as_ref() != Some(*name)).take(TOGETHER).cloned().collect()
    }
}

fn names(channels: &[Arc<str>]) -> Vec<String> {
    channels.iter().map(ToString::to_string).collect()
}

impl NotifyGateActor {
    /// The own channel is listened to: the others follow.
    pub(super) fn listening_to_work(&mut self, channel: &str, ctx: &mut Context<Self>) {
        let channel: Arc<str> = channel.into();
        if let Some(open) = &mut self.open {
            open.listening.asked.insert(Arc::clone(&channel));
            open.listening.acknowledged.insert(Arc::clone(&channel));
            open.listening.work = Some(Arc::clone(&channel));
        }
        self.parts.channels.listened(&[channel]);
        self.sync(ctx);
    }

    /// Listens to what is missing and gives up what is not wanted any more, one statement after the other.
    pub(super) fn sync(&mut self, ctx: &mut Context<Self>) {
        let wanted = self.parts.channels.wanted();
        let Some(listening) = self.open.as_mut().map(|open| &mut open.listening) else { return };
        if listening.work.is_none() || listening.busy {
            return;
        }
        let (missing, surplus) = (listening.missing(&wanted), listening.surplus(&wanted));
        if !missing.is_empty() {
            self.listen_to(missing, ctx);
        } else if !surplus.is_empty() {
            self.listen_no_more(surplus, ctx);
        } else {
            listening.singly = false;
            let rest = !listening.resting.is_empty() && !self.resting.is_set();
            let first = !std::mem::replace(&mut listening.complete, true);
            if rest {
                self.resting.set(ctx, REST, |act, ctx| {
                    act.resting.rang();
                    if let Some(open) = &mut act.open {
                        open.listening.resting.clear();
                    }
                    act.sync(ctx);
                });
            }
            if first {
                self.prove(ctx);
            }
        }
    }

    fn listen_to(&mut self, channels: Vec<Arc<str>>, ctx: &mut Context<Self>) {
        let Some(listening) = self.open.as_mut().map(|open| &mut open.listening) else { return };
        listening.busy = true;
        listening.asked.extend(channels.iter().cloned());
        self.counters.listens += 1;
        let names = names(&channels);
        self.ask(
            async move |session| session.listen(names).await,
            ctx,
            move |act, answer, ctx| {
                let Some(listening) = act.open.as_mut().map(|open| &mut open.listening) else { return };
                listening.busy = false;
                match answer {
                    Ok(()) => {
                        listening.acknowledged.extend(channels.iter().cloned());
                        act.parts.channels.listened(&channels);
                        act.catch_up(ctx);
                    }
                    Err(error) => act.refused("listened to", &channels, &error),
                }
                act.sync(ctx);
            },
        );
    }

    fn listen_no_more(&mut self, channels: Vec<Arc<str>>, ctx: &mut Context<Self>) {
        let Some(listening) = self.open.as_mut().map(|open| &mut open.listening) else { return };
        listening.busy = true;
        listening.acknowledged.retain(|name| !channels.contains(name));
        self.counters.unlistens += 1;
        let names = names(&channels);
        self.ask(
            async move |session| session.unlisten(names).await,
            ctx,
            move |act, answer, ctx| {
                let Some(listening) = act.open.as_mut().map(|open| &mut open.listening) else { return };
                listening.busy = false;
                match answer {
                    Ok(()) => listening.asked.retain(|name| !channels.contains(name)),
                    Err(error) => act.refused("given up", &channels, &error),
                }
                act.sync(ctx);
            },
        );
    }

    fn refused(&mut self, what: &'static str, channels: &[Arc<str>], error: &StoreError) {
        if self.channel_health.wrong(error) {
            let first = channels.first().map_or("", |name| &**name);
            tracing::warn!(%error, first, channels = channels.len(), "channels cannot be {what}; it is tried again");
        }
        let Some(listening) = self.open.as_mut().map(|open| &mut open.listening) else { return };
        if channels.len() > 1 && !listening.singly {
            listening.singly = true;
        } else {
            listening.resting.extend(channels.iter().cloned());
        }
    }

    /// Tells whoever is behind, now and again until nobody is.
    pub(super) fn catch_up(&mut self, ctx: &mut Context<Self>) {
        let Some(open) = &self.open else { return };
        let told = self.parts.channels.catch_up(&open.listening.acknowledged);
        self.told(told, ctx);
    }

    pub(super) fn told(&mut self, told: Told, ctx: &mut Context<Self>) {
        self.counters.told += told.sent;
        self.counters.refused += told.refused;
        if told.behind && !self.behind.is_set() {
            self.behind.set(ctx, FULL, |act, ctx| {
                act.behind.rang();
                act.catch_up(ctx);
            });
        }
    }
}

impl Handler<Subscribe> for NotifyGateActor {
    type Result = Result<(), SubscribeError>;

    fn handle(&mut self, Subscribe { channel, to }: Subscribe, ctx: &mut Self::Context) -> Self::Result {
        SubscribeError::check(&channel)?;
        self.parts.channels.add(channel, to);
        self.sync(ctx);
        self.catch_up(ctx);
        Ok(())
    }
}

impl Handler<Unsubscribe> for NotifyGateActor {
    type Result = ();

    fn handle(&mut self, Unsubscribe { channel, to }: Unsubscribe, ctx: &mut Self::Context) {
        self.parts.channels.remove(&channel, &to);
        self.sync(ctx);
    }
}
