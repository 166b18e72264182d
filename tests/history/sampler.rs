//! Looks at all tables in one snapshot again and again, and at what claims wait for.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Statement;
use uuid::Uuid;

use super::World;
use crate::work::{KINDS, Session, session};

type Stream = (&'static str, Uuid, String);

/// Samples until the run is over; returns how often.
pub(crate) async fn sample(world: Arc<World>) -> usize {
    let db = session(&world.url).await;
    // The clock is read once, after the snapshot: what is live then was live in it, and all rows of a run end in the same instant.
    let parts: Vec<_> = KINDS
        .iter()
        .map(|kind| {
            format!(
                "select '{}'::text, stream_id, {}, seq, instance_id, instance_id is not null and lease_expiry > clock.now
                 from {} cross join clock where stream_id is not null and {} is null",
                kind.category,
                kind.lane.unwrap_or("''"),
                kind.table,
                kind.done
            )
        })
        .collect();
    let clock = "with clock as materialized (select clock_timestamp() as now)";
    let snapshot = db.prepare(&format!("{clock} {}", parts.join(" union all "))).await.expect("a statement");
    let waits = "select wait_event, pid::text || query_start::text,
                    (select string_agg(b.state || ' ' || b.query, '; ') from pg_stat_activity b where b.pid = any (pg_blocking_pids(a.pid)))
                 from pg_stat_activity a where wait_event_type = 'Lock' and state = 'active'
                 and wait_event in ('tuple', 'transactionid', 'advisory', 'virtualxid') and query like '%hist.claim(%'
                 and datname = current_database()";
    let waits = db.prepare(waits).await.expect("a statement");
    let mut samples = 0;
    while !world.is_over() {
        look_at_waits(&world, &db, &waits).await;
        let mut streams: BTreeMap<Stream, Vec<(i64, Option<Uuid>, bool)>> = BTreeMap::new();
        for row in (*db).query(&snapshot, &[]).await.expect("a snapshot") {
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

/// What a session waits for is read after its statement, so the wait may be its next statement's: only who is seen again and again at
/// one statement waits in it.
async fn look_at_waits(world: &World, db: &Session, waits: &Statement) {
    let mut suspects: Option<HashSet<String>> = None;
    for looks in 0..4 {
        let mut waiting = HashSet::new();
        for row in (**db).query(waits, &[]).await.expect("the waits") {
            let key: String = row.get(1);
            if suspects.as_ref().is_some_and(|before| !before.contains(&key)) {
                continue;
            }
            if looks == 3 {
                let (lock, by): (String, Option<String>) = (row.get(0), row.get(2));
                world.violated(format!("a claim waited for a {lock} lock, held by {by:?}"));
            }
            waiting.insert(key);
        }
        if waiting.is_empty() {
            return;
        }
        suspects = Some(waiting);
    }
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
