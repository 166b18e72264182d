//! Who hears which channel.
//!
//! The rule: a subscriber is told that its channel is listened to before it hears anything of it, and again after anything it may have
//! missed: a session that was lost, or a ring for which its mailbox had no room. So whoever looks at the state of things each time it is
//! told so misses nothing, and nobody has to keep rings for a mailbox that is full. The list belongs to the pump, not to a life of the
//! actor. The failures this prevents: one slow subscriber that holds up the others or fills the memory, and a cache that is stale for
//! ever after a reconnect.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use actix::dev::SendError;
use actix::prelude::*;

use crate::lock;
use crate::message::Heard;

/// The list. Starts empty.
#[derive(Debug, Default)]
pub struct Channels(Mutex<BTreeMap<Arc<str>, Vec<Member>>>);

#[derive(Debug)]
struct Member {
    to: Recipient<Heard>,
    /// It has to be told that its channel is listened to, before it hears the next ring.
    behind: bool,
}

/// What a round of telling did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// Messages that went out.
    pub(super) sent: u64,
    /// Rings that a subscriber did not get, and will look for.
    pub(super) refused: u64,
    /// Whether somebody is still behind.
    pub(super) behind: bool,
}

impl Channels {
    /// Adds somebody, once. It is to be told when its channel is listened to, also when it was before.
    pub(super) fn add(&self, channel: Arc<str>, to: Recipient<Heard>) {
        let mut all = lock(&self.0);
        let members = all.entry(channel).or_default();
        match members.iter_mut().find(|member| member.to == to) {
            Some(member) => member.behind = true,
            None => members.push(Member { to, behind: true }),
        }
    }

    /// Forgets somebody.
    pub(super) fn remove(&self, channel: &str, to: &Recipient<Heard>) {
        if let Some(members) = lock(&self.0).get_mut(channel) {
            members.retain(|member| member.to != *to);
        }
    }

    /// The channels that somebody hears. Forgets whoever has ended.
    pub(super) fn wanted(&self) -> BTreeSet<Arc<str>> {
        let mut all = lock(&self.0);
        all.retain(|_, members| {
            members.retain(|member| member.to.connected());
            !members.is_empty()
        });
        all.keys().cloned().collect()
    }

    /// How many subscriptions there are.
    pub(super) fn subscriptions(&self) -> u64 {
        lock(&self.0).values().map(|members| members.len() as u64).sum()
    }

    /// Another session: nothing is listened to yet, and whatever was rung for meanwhile is missed. A ring may come before the answer to the
    /// LISTEN that brings it, so everybody has to be told first.
    pub(super) fn begin_anew(&self) {
        for member in lock(&self.0).values_mut().flatten() {
            member.behind = true;
        }
    }

    /// These channels are listened to from now on: everybody there has to be told.
    pub(super) fn listened(&self, channels: &[Arc<str>]) {
        let mut all = lock(&self.0);
        for channel in channels {
            for member in all.get_mut(channel).into_iter().flatten() {
                member.behind = true;
            }
        }
    }

    /// Tells whoever is behind on one of these channels, if there is room.
    pub(super) fn catch_up(&self, listened: &BTreeSet<Arc<str>>) -> Told {
        let mut told = Told::default();
        let mut all = lock(&self.0);
        for (channel, members) in all.iter_mut().filter(|(channel, _)| listened.contains(*channel)) {
            members.retain_mut(|member| {
                if !member.behind {
                    return true;
                }
                let sent = member.to.try_send(Heard::Listening { channel: Arc::clone(channel) });
                member.behind = sent.is_err();
                told.sent += u64::from(sent.is_ok());
                let alive = !matches!(sent, Err(SendError::Closed(_)));
                told.behind |= member.behind && alive;
                alive
            });
        }
        told
    }

    /// Somebody rang.
    pub(super) fn ring(&self, channel: &str, payload: &str) -> Told {
        let mut told = Told::default();
        let mut all = lock(&self.0);
        let Some((channel, payload)) =
            all.get_key_value(channel).map(|(name, _)| (Arc::clone(name), payload))
        else {
            return told;
        };
        let payload: Arc<str> = payload.into();
        for member in all.get_mut(&channel).into_iter().flatten() {
            let ring = Heard::Rung { channel: Arc::clone(&channel), payload: Arc::clone(&payload) };
            member.behind = member.behind || member.to.try_send(ring).is_err();
            told.sent += u64::from(!member.behind);
            told.refused += u64::from(member.behind);
            told.behind |= member.behind;
        }
        told
    }
}
