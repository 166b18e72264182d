//! Direct addresses that are none: a pooler's, another database's, one that is refused.

use std::time::Duration;

use workpump::engine::instance::Gate;

use crate::common::proxy::{Door, Flow};
use crate::common::wait::eventually;
use crate::common::{self, Bouncer};
use crate::rig::{Rig, door, store, through, tight_without_gate, value};

/// The gate says no, and why.
async fn unavailable_because(url: &str, direct_url: &str, reason: &str) -> Rig {
    let mut rig = Rig::start(url, direct_url, tight_without_gate()).await;
    rig.until(Gate::Unavailable).await;
    // At first nothing is proven; the reason comes with the answer.
    let told = async || rig.pump.gate().reason.is_some_and(|told| told.contains(reason));
    eventually(&format!("the reason {reason:?}"), told).await;
    rig
}

#[tokio::test]
async fn a_direct_address_that_leads_to_a_pooler_is_no_gate_and_says_so_and_work_is_found_by_polling() {
    let db = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    let mut rig = unavailable_because(db.url(), &bouncer.url(db.name()), "pooler").await;
    let client = db.connect().await;
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        quickest = quickest.min(rig.relay_one(&client).await);
    }
    println!("without a gate: a row is relayed after {quickest:.1?}");
    assert!(quickest <= Duration::from_millis(500), "{quickest:?}: it polls every 100 ms");
    // Many polls later it is still as quick: nothing has relaxed.
    tokio::time::sleep(Duration::from_secs(2)).await;
    store(&client, 1).await;
    rig.published().await;
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

/// The start cannot see it, because the database URL is not answered at that moment. It claims from where the direct address leads, so
/// nothing that is stored by the other one is ever found: all the more has it to be told.
#[tokio::test]
async fn a_direct_address_of_another_database_is_no_gate_and_says_so() {
    let (db, other) = (common::database().await, common::database().await);
    let door = door().await;
    door.set(Door::Shut).await;
    let mut rig = Rig::start(&through(&door, &db), other.url(), tight_without_gate()).await;
    rig.until(Gate::Unavailable).await;
    door.set(Door::Open).await;
    let told = async || rig.pump.gate().reason.is_some_and(|told| told.contains("to the very database"));
    eventually("the reason", told).await;
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn while_the_direct_address_is_refused_claims_go_through_the_database_url_and_back_when_it_is_not() {
    let db = common::database().await;
    let (client, door) = (db.connect().await, door().await);
    let mut rig = Rig::start(db.url(), &through(&door, &db), tight_without_gate()).await;
    let armed = format!(
        "select exists (select from wh_held_keys() h where h.key = wh_arm_key('{}'))",
        rig.pump.instance_id()
    );
    for _ in 0..3 {
        rig.until(Gate::Available).await;
        eventually("it is armed, on the direct address", async || value::<bool>(&client, &armed).await).await;
        rig.relay_one(&client).await;
        door.set(Door::Shut).await;
        door.all(Flow::Close);
        rig.until(Gate::Unavailable).await;
        let mut quickest = Duration::MAX;
        for _ in 0..5 {
            quickest = quickest.min(rig.relay_one(&client).await);
        }
        println!("with the direct address refused: a row is relayed after {quickest:.1?}");
        assert!(quickest <= Duration::from_millis(500), "{quickest:?}: it polls every 100 ms");
        assert!(!value::<bool>(&client, &armed).await, "whoever is not rung must not seem to sleep");
        door.set(Door::Open).await;
    }
    rig.until(Gate::Available).await;
    rig.pump.drain().await;
}
