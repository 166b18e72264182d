//! A process that dies behind a pooler: the pooler's sessions live on, and nothing in them may speak for the dead.

use crate::common;
use crate::fleet::{Relay, To, evictions, store, stuck_with, until, value};

/// Beats often, so that the test need not wait for two beats of half a minute.
const OFTEN: [(&str, &str); 1] = [("WORKPUMP_HEARTBEAT_INTERVAL_SECONDS", "1")];

#[tokio::test]
async fn a_process_killed_behind_the_pooler_is_seen_as_dead_and_its_rows_are_taken_over() {
    let database = common::database().await;
    let control = database.connect_direct().await;
    let mut victim = stuck_with(&control, database.url(), 50, &OFTEN).await;
    let lock = "select lock_held or lock_declared from wh_live_instances";
    assert!(!value::<bool>(&control, lock).await, "a lock would be the pooler's, and outlive everybody");
    let killed = victim.kill();
    let peer = Relay::start(&control, database.url(), To::Nowhere, &OFTEN).await;
    store(&control, 10).await;
    // The declared second counts twice and five more; then the word of the one who asks.
    until(&control, &format!("select not is_instance_alive('{}', 8)", victim.id)).await;
    println!("killed behind the pooler: not alive after {:.1?}", killed.elapsed());
    // Those of the dead one stay until the stale limit of 30 s.
    until(&control, "select count(*) = 0 from wh_outbox").await;
    println!("and its rows were taken over after {:.1?}", killed.elapsed());
    assert_eq!(evictions(&control).await, [(victim.id, "stale heartbeat".to_owned())]);
    assert!(peer.drain().await.success());
}
