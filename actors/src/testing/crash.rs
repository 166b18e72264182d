//! Deaths of actors.
//!
//! The rule: an actor that is to die for a test dies where it stands, between two messages, without a last word. The failure this
//! prevents: tests of restarts that pass because the actor could still tidy up.

use actix::prelude::*;

use crate::actor::claim::ClaimActor;
use crate::actor::dispatch::DispatchActor;
use crate::actor::heartbeat::HeartbeatActor;
use crate::actor::lease_renewal::LeaseRenewalActor;
use crate::actor::notify_gate::NotifyGateActor;
use crate::actor::settle::SettleActor;
use crate::actor::stale_sweep::StaleSweepActor;

/// Makes the actor that gets it panic.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Crash;

/// Ends the actor that gets it as a panic would, without the noise.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct End;

macro_rules! mortal {
    ($($actor:ty),*) => {$(
        impl Handler<Crash> for $actor {
            type Result = ();

            fn handle(&mut self, _: Crash, _: &mut Self::Context) {
                panic!("crashed as asked");
            }
        }

        impl Handler<End> for $actor {
            type Result = ();

            fn handle(&mut self, _: End, ctx: &mut Self::Context) {
                ctx.terminate();
            }
        }
    )*};
}

mortal!(
    ClaimActor,
    DispatchActor,
    SettleActor,
    HeartbeatActor,
    LeaseRenewalActor,
    NotifyGateActor,
    StaleSweepActor
);

/// Ends an actor and waits until it is gone.
pub(super) async fn end<A>(addr: &Addr<A>)
where
    A: Actor<Context = Context<A>> + Handler<End>,
{
    // It may have ended already.
    let _ = addr.send(End).await;
    while addr.connected() {
        tokio::task::yield_now().await;
    }
}
