//! The heartbeat is switched off or on: the alive-lock goes, or comes back, with a session.
//!
//! The rule: the lock goes with its session, never by itself; the next session asks for it while the heartbeat is on. The failure this
//! prevents: the late answer of a request that was under way at the switch, and so a lock that is held although nobody wants it.

use actix::prelude::*;

use crate::instance::Gate;
use crate::message::HeartbeatSwitched;

use super::NotifyGateActor;

impl Handler<HeartbeatSwitched> for NotifyGateActor {
    type Result = ();

    fn handle(&mut self, _: HeartbeatSwitched, ctx: &mut Self::Context) {
        let Some(open) = self.open.as_ref().filter(|_| !self.over) else { return };
        let on = self.parts.standing.wants_heartbeat();
        // Off also when no lock is held: a request for it may be under way.
        if on && (open.lock.is_some() || !self.wants_lock()) {
            return;
        }
        self.end_session();
        self.quiet_session(ctx);
        self.set_gate(
            Gate::Unavailable,
            Some("the heartbeat was switched: the direct session is opened again"),
            ctx,
        );
        self.connect(ctx);
    }
}
