//! Who wants to know of evictions.
//!
//! The rule: the list belongs to the pump, not to a life of the actor. The failure this prevents: metrics that fall silent after a restart.

use std::sync::Mutex;

use actix::prelude::*;

use crate::lock;
use crate::message::PeerEvicted;

/// The list. Starts empty.
#[derive(Debug, Default)]
pub struct Subscribers(Mutex<Vec<Recipient<PeerEvicted>>>);

impl Subscribers {
    /// Adds somebody, once.
    pub fn add(&self, who: Recipient<PeerEvicted>) {
        let mut all = lock(&self.0);
        all.retain(Recipient::connected);
        if !all.contains(&who) {
            all.push(who);
        }
    }

    /// Tells everybody who is still there.
    pub(super) fn tell(&self, news: PeerEvicted) {
        let mut all = lock(&self.0);
        all.retain(Recipient::connected);
        all.iter().for_each(|who| who.do_send(news));
    }
}
