//! Producers with open transactions, and outsiders who lock rows and let time pass.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Op, World, spend};
use crate::common::wait::PATIENCE;
use crate::work::{KINDS, Kind, Session, scattered, session};

async fn unfinished(db: &Session) -> i64 {
    let parts: Vec<_> = KINDS
        .iter()
        .map(|kind| format!("(select count(*) from {} where {} is null)", kind.table, kind.done))
        .collect();
    db.number(&format!("select {}", parts.join(" + "))).await
}

/// Waits until all work is finished. False: it never was.
pub(crate) async fn drained(world: &World) -> bool {
    let db = session(&world.url).await;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if unfinished(&db).await == 0 {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

type Place = (&'static str, Option<Uuid>, &'static str);

fn places(choices: &mut StdRng) -> Vec<Place> {
    let mut places: Vec<Place> = (0..choices.random_range(1..4))
        .map(|_| {
            let kind = KINDS[choices.random_range(0..4)];
            let stream = scattered(choices.random_range(0..5));
            let unordered = kind.unordered && choices.random_bool(0.25);
            let lane = if kind.lane.is_some() && choices.random_bool(0.5) { "b" } else { "a" };
            (kind.category, (!unordered).then_some(stream), lane)
        })
        .collect();
    places.sort_unstable();
    places.dedup();
    places
}

pub(crate) async fn produce(world: Arc<World>, number: u64) {
    let (db, mut choices) = (session(&world.url).await, world.choices(number));
    while !world.is_settling() && !world.is_over() {
        if unfinished(&db).await > world.enough {
            spend(&mut choices, 20).await;
            continue;
        }
        let places = places(&mut choices);
        db.batch_execute("begin").await.expect("begin");
        if world.serialised {
            // In one order, so that producers do not deadlock.
            for place in &places {
                let sql = "select pg_advisory_xact_lock(hashtextextended($1, 7))";
                db.query(sql, &[&format!("{place:?}")]).await.expect("the lock of a stream");
            }
        }
        let mut stored = Vec::new();
        for (category, stream, lane) in places {
            for _ in 0..choices.random_range(1..6) {
                let kind = Kind::named(category);
                let id = db.store_in(kind, stream, lane).await;
                if choices.random_bool(0.1) {
                    db.park(kind, id, choices.random_range(0.0..0.4)).await;
                }
                stored.push(id);
            }
            spend(&mut choices, 3).await;
        }
        spend(&mut choices, 6).await;
        if choices.random_bool(0.1) {
            db.batch_execute("rollback").await.expect("rollback");
        } else {
            db.batch_execute("commit").await.expect("commit");
            db.execute("insert into hist.committed (id) select unnest($1::uuid[])", &[&stored])
                .await
                .expect("the commit");
        }
    }
}

/// A producer that is late on purpose: it commits the first row of a stream while the claim of the second is not committed.
pub(crate) async fn come_late(world: Arc<World>, number: u64) {
    let (db, late) = (session(&world.url).await, session(&world.url).await);
    let mut choices = world.choices(number);
    while !world.is_settling() && !world.is_over() {
        let (kind, stream) = (KINDS[choices.random_range(0..4)], scattered(number));
        late.batch_execute("begin").await.expect("begin");
        let first = late.store(kind, stream).await;
        let second = db.store(kind, stream).await;
        let note = "insert into hist.committed (id) values ($1)";
        db.execute(note, &[&second]).await.expect("the commit");
        let free = format!("select 1 from {} where {} = $1 for update skip locked", kind.table, kind.key);
        for _ in 0..100 {
            if db.query(&free, &[&second]).await.expect("a look").is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        late.batch_execute("commit").await.expect("commit");
        late.execute(note, &[&first]).await.expect("the commit");
        spend(&mut choices, 20).await;
    }
}

/// Locks a few rows, or affinity rows, for a while.
pub(crate) async fn lock_things(world: Arc<World>, number: u64) {
    let (db, mut choices) = (session(&world.url).await, world.choices(number));
    while !world.is_settling() && !world.is_over() {
        let table = if choices.random_bool(0.2) {
            "wh_active_streams"
        } else {
            KINDS[choices.random_range(0..4)].table
        };
        let count = choices.random_range(1..4);
        let sql =
            format!("begin; select 1 from {table} order by random() limit {count} for update skip locked");
        db.batch_execute(&sql).await.expect("locks");
        // Now and then long enough that whoever waits is seen waiting, on a busy machine too.
        let up_to_millis = if choices.random_bool(0.05) { 600 } else { 40 };
        spend(&mut choices, up_to_millis).await;
        db.batch_execute("commit").await.expect("commit");
        spend(&mut choices, 5).await;
    }
}

pub(crate) async fn let_time_pass(world: Arc<World>, number: u64) {
    let (db, mut choices) = (session(&world.url).await, world.choices(number));
    while !world.is_over() {
        let kind = KINDS[choices.random_range(0..4)];
        let lane = kind.lane.unwrap_or("''");
        let op = world.begin(Op::Warp);
        let sql = "select hist.warp($1, $2, $3, $4)";
        if let Err(error) = db.query(sql, &[&op, &kind.table, &kind.key, &lane]).await {
            world.violated(format!("time cannot pass: {error:?}"));
        }
        spend(&mut choices, 15).await;
    }
}
