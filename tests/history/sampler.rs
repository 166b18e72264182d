//! Looks at all tables in one snapshot again and again, and at what claims wait for.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::World;
use crate::work::{KINDS, session};

type Stream = (&'static str, Uuid, String);

/// Samples until the run is over; returns how often.
pub(crate) async fn sample(world: Arc<World>) -> usize {
    let db = session(&world.url).await;
    // The clock is read after the snapshot: what is live then was live in it.
    let parts: Vec<_> = KINDS
        .iter()
        .map(|kind| {
            format!(
                "select '{}'::text, stream_id, {}, seq, instance_id, instance_id is not null and lease_expiry > clock_timestamp()
                 from {} where stream_id is not null and {} is null",
                kind.category,
                kind.lane.unwrap_or("''"),
                kind.table,
                kind.done
            )
        })
        .collect();
    let snapshot = db.prepare(&parts.join(" union all ")).await.expect("a statement");
    let waits = "select wait_event, pid::text || query_start::text from pg_stat_activity where wait_event_type = 'Lock' and state = 'active'
                 and wait_event in ('tuple', 'transactionid', 'advisory', 'virtualxid') and query like '%hist.claim(%'
                 and datname = current_database()";
    let waits = db.prepare(waits).await.expect("a statement");
    let mut samples = 0;
    while !world.is_over() {
        // What a session waits for is read after its statement: only who is seen twice at one statement waits in it.
        let suspects = db.query(&waits, &[]).await.expect("the waits");
        if !suspects.is_empty() {
            let suspects: HashSet<String> = suspects.iter().map(|row| row.get(1)).collect();
            for row in db.query(&waits, &[]).await.expect("the waits") {
                if suspects.contains(row.get::<_, &str>(1)) {
                    world.violated(format!("a claim waited for a {} lock", row.get::<_, String>(0)));
                }
            }
        }
        let mut streams: BTreeMap<Stream, Vec<(i64, Option<Uuid>, bool)>> = BTreeMap::new();
        for row in db.query(&snapshot, &[]).await.expect("a snapshot") {
            let category: String = row.get(0);
            let kind = crate::work::Kind::named(&category).category;
            let stream = (kind, row.get(1), row.get(2));
            streams.entry(stream).or_default().push((row.get(3), row.get(4), row.get(5)));
        }
        for (stream, rows) in streams {
            look(&world, &stream, rows);
        }
        samples += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    samples
}

fn look(world: &World, stream: &Stream, mut rows: Vec<(i64, Option<Uuid>, bool)>) {
    rows.sort_unstable();
    let owners: HashSet<_> =
        rows.iter().filter(|(_, _, live)| *live).filter_map(|(_, owner, _)| *owner).collect();
    if owners.len() > 1 {
        world.violated(format!("{stream:?} has {} live owners", owners.len()));
    }
    let live = rows.iter().filter(|(_, _, live)| *live).count();
    if world.serialised && rows.iter().take(live).any(|(_, _, live)| !live) {
        let picture: Vec<_> =
            rows.iter().map(|(seq, owner, live)| (seq, owner.map(|o| o.as_u128() % 997), live)).collect();
        world.violated(format!("the live leases of {stream:?} are no prefix: {picture:?}"));
    }
}
