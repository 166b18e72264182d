//! The test kit: paused time, a store in memory, and stand-ins for neighbours.
//!
//! The rule: nothing here sleeps for real or opens a socket; everything runs on one thread in virtual time. The failure this prevents:
//! tests of cadences that take minutes and fail on a busy machine.

mod crash;
mod fake;
mod fake_direct;
mod fake_peers;
mod gate_rig;
mod heartbeat_rig;
mod probe;
mod renewal_rig;
mod rig;
mod sweep_rig;
mod table;

pub use crash::Crash;
pub use fake::{Call, FakeStore, Op, Reply};
pub use fake_direct::{DirectOp, FakeDirect};
pub use fake_peers::{FakeDeathWatch, FakeSweep};
pub use gate_rig::GateRig;
pub use heartbeat_rig::HeartbeatRig;
pub use probe::{ProbeActor, TestProbe, runner};
pub use renewal_rig::RenewalRig;
pub use rig::{ClaimRig, DispatchRig, SettleRig, deliver, deliver_under, engine_parts, identity};
pub use sweep_rig::SweepRig;
pub use table::{Row, claimed};

use actix::System;

/// Runs a test in virtual time: one thread, an actix system, a paused clock.
///
/// Time moves only when everything waits, and then straight to the next timer. Move it with `tokio::time::sleep`.
///
/// # Panics
///
/// When no runtime can be made.
pub fn in_virtual_time<T>(test: impl Future<Output = T>) -> T {
    let system = System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime for the test")
    });
    system.block_on(test)
}

/// The machine is suspended for this long, as far as this thread can see: every timer stands still, and the clock of leases does not.
pub fn suspend(time: std::time::Duration) {
    crate::clock::fake::suspend(time);
}

/// Lets everything run that can run now, without moving time.
pub async fn quiesce() {
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
}
