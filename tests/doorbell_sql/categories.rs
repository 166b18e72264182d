//! Members that do not run everything: whoever is rung for a row can claim it.

use tokio_postgres::Client;
use uuid::Uuid;

use super::common;
use super::sql::{Listener, instance, refused, rings, run, stream, value};
use super::{assign, sleeper, stream_of_share};

const KNOWN: [&str; 4] = ["outbox", "inbox", "perspective_event", "receptor"];

/// A member that sleeps and said what it runs.
async fn sleeper_of(db: &common::Database, id: Uuid, categories: &str) -> Client {
    let client = sleeper(db, id).await;
    declare(&client, id, categories).await;
    client
}

async fn declare(client: &Client, id: Uuid, categories: &str) {
    let beat = format!("select record_heartbeat('{id}', 's', 'h', 1, p_categories => {categories})");
    assert!(value::<bool>(client, &beat).await);
}

/// One statement that stores a row for each of these streams.
fn insert(category: &str, streams: &[Option<Uuid>]) -> String {
    let (into, values) = match category {
        "outbox" => ("wh_outbox (message_type, payload", "'t', '1'"),
        "inbox" => ("wh_inbox (message_type, payload", "'t', '1'"),
        "perspective_event" => {
            ("wh_perspective_events (perspective_name, event_id", "'p', gen_random_uuid()")
        }
        _ => ("wh_receptor_processing (receptor_name, event_id", "'r', gen_random_uuid()"),
    };
    let streams: Vec<String> = streams
        .iter()
        .map(|stream| stream.map_or_else(|| "null".to_owned(), |stream| format!("'{stream}'")))
        .collect();
    format!(
        "insert into {into}, stream_id) select {values}, s from unnest(array[{}]::uuid[]) s",
        streams.join(", ")
    )
}

/// Streams of every kind, alone and together: none, of either member, of nobody alive, of nobody, and one that was never seen.
fn every_kind(kinds: &[Uuid; 4], fresh: impl Fn() -> Uuid) -> Vec<Vec<Option<Uuid>>> {
    let mut sets: Vec<Vec<Option<Uuid>>> = kinds.iter().map(|kind| vec![Some(*kind)]).collect();
    sets.extend(kinds.iter().map(|kind| vec![Some(*kind), Some(*kind)]));
    sets.extend([vec![None], vec![None; 3], vec![Some(fresh())], vec![Some(fresh()), Some(fresh())]]);
    sets.push(kinds.iter().copied().map(Some).collect());
    sets.push(kinds.iter().copied().map(Some).chain([None, Some(fresh())]).collect());
    sets
}

/// Whoever is older, and so the first in every list: the one that runs the category, or the one that does not.
#[tokio::test]
async fn only_a_member_that_runs_the_category_is_rung_whatever_the_stream() {
    for [publisher, handler] in [[1, 2], [2, 1]] {
        let db = common::database().await;
        let producer = db.connect().await;
        let _sleepers = [
            sleeper_of(&db, instance(publisher), "'{outbox}'").await,
            sleeper_of(&db, instance(handler), "'{inbox,receptor}'").await,
        ];
        let mut listener = Listener::for_instances(db.direct_url(), &[1, 2].map(instance)).await;
        let kinds = [1, 2, 3, 4].map(stream);
        assign(&producer, kinds[0], instance(1)).await;
        assign(&producer, kinds[1], instance(2)).await;
        assign(&producer, kinds[2], instance(99)).await;
        run(&producer, &format!("insert into wh_active_streams (stream_id) values ('{}')", kinds[3])).await;
        for category in KNOWN {
            let taker = match category {
                "outbox" => Some(publisher),
                "perspective_event" => None,
                _ => Some(handler),
            };
            let expected: Vec<(u32, &str)> =
                taker.into_iter().map(|taker| (taker as u32, category)).collect();
            for streams in every_kind(&kinds, Uuid::now_v7) {
                if category == "perspective_event" && streams.contains(&None) {
                    continue;
                }
                run(&producer, &insert(category, &streams)).await;
                assert_eq!(listener.rung().await, rings(&expected), "{category} {streams:?}");
                let array: Vec<String> =
                    streams.iter().flatten().map(|stream| format!("'{stream}'")).collect();
                let by_hand = format!(
                    "select notify_instance_owners('{category}', array[{}]::uuid[])",
                    array.join(", ")
                );
                let rung = if array.is_empty() { 0 } else { expected.len() };
                assert_eq!(value::<i32>(&producer, &by_hand).await, rung as i32, "{category} {streams:?}");
                assert_eq!(
                    listener.rung().await,
                    rings(&expected[..rung]),
                    "by hand: {category} {streams:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn shares_are_counted_among_those_that_run_the_category() {
    let db = common::database().await;
    let producer = db.connect().await;
    let _sleepers = [
        sleeper_of(&db, instance(1), "'{outbox}'").await,
        sleeper_of(&db, instance(2), "'{inbox}'").await,
        sleeper_of(&db, instance(3), "'{inbox}'").await,
    ];
    let mut listener = Listener::for_instances(db.direct_url(), &[1, 2, 3].map(instance)).await;
    let shares = [stream_of_share(&producer, 2, 0).await, stream_of_share(&producer, 2, 1).await];
    for (share, taker) in shares.into_iter().zip([2, 3]) {
        // Never seen, then known.
        for _ in 0..2 {
            run(&producer, &insert("inbox", &[Some(share)])).await;
            assert_eq!(listener.rung().await, rings(&[(taker, "inbox")]));
        }
    }
    run(&producer, &insert("inbox", &shares.map(Some))).await;
    assert_eq!(listener.rung().await, rings(&[(2, "inbox"), (3, "inbox")]));
    run(&producer, &insert("outbox", &shares.map(Some))).await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox")]));
}

#[tokio::test]
async fn who_did_not_say_what_it_runs_runs_all_and_who_said_nothing_none() {
    let db = common::database().await;
    let producer = db.connect().await;
    let _sleepers = [sleeper_of(&db, instance(1), "'{}'").await, sleeper_of(&db, instance(2), "null").await];
    let mut listener = Listener::for_instances(db.direct_url(), &[1, 2].map(instance)).await;
    assign(&producer, stream(1), instance(1)).await;
    for category in KNOWN {
        for streams in [&[Some(stream(1))][..], &[Some(stream(2))], &[Some(stream(1)), Some(stream(2))]] {
            run(&producer, &insert(category, streams)).await;
            assert_eq!(listener.rung().await, rings(&[(2, category)]), "{streams:?}");
        }
    }
    // A beat of an older library takes the declaration back.
    declare(&producer, instance(2), "'{inbox}'").await;
    run(&producer, &insert("outbox", &[None])).await;
    assert_eq!(listener.rung().await, []);
    assert!(super::beat(&producer, instance(2)).await);
    run(&producer, &insert("outbox", &[None])).await;
    assert_eq!(listener.rung().await, rings(&[(2, "outbox")]));
    // One that beats without a word leaves it alone.
    declare(&producer, instance(2), "'{inbox}'").await;
    run(
        &producer,
        &format!(
            "update wh_service_instances set last_heartbeat_at = clock_timestamp() - interval '20 s'; \
                             select register_instance_heartbeat('{}', 's', 'h', 1)",
            instance(2)
        ),
    )
    .await;
    run(&producer, &insert("outbox", &[None])).await;
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn rows_that_came_free_ring_those_that_run_them_and_orphans_ring_all() {
    let db = common::database().await;
    let client = db.connect().await;
    let _sleepers = [
        sleeper_of(&db, instance(1), "'{outbox}'").await,
        sleeper_of(&db, instance(2), "'{inbox}'").await,
        sleeper_of(&db, instance(3), "null").await,
    ];
    let mut listener = Listener::for_instances(db.direct_url(), &[1, 2, 3].map(instance)).await;
    for (payload, rung) in
        [("outbox", &[1, 3][..]), ("inbox", &[2, 3]), ("receptor", &[3]), ("orphan", &[1, 2, 3])]
    {
        run(&client, &format!("select wh_ring_armed('{payload}')")).await;
        let expected: Vec<(u32, &str)> = rung.iter().map(|id| (*id, payload)).collect();
        assert_eq!(listener.rung().await, rings(&expected));
    }
    // Whoever leaves or dies may have held anything.
    for gone in ["select evict_instance('$id', null, 'by hand')", "select deregister_instance('$id')"] {
        super::beat(&client, instance(4)).await;
        run(&client, &gone.replace("$id", &instance(4).to_string())).await;
        let heard: Vec<u32> = listener.rung().await.into_iter().map(|(id, _)| id).collect();
        assert!([1, 2, 3].iter().all(|id| heard.contains(id)), "{gone}: {heard:?}");
        run(&client, &format!("delete from wh_instance_evictions where instance_id = '{}'", instance(4)))
            .await;
    }
}

#[tokio::test]
async fn a_ring_is_passed_on_for_each_category_to_a_peer_that_runs_it_and_has_room() {
    let db = common::database().await;
    let client = db.connect().await;
    let me = instance(5);
    declare(&client, me, "'{inbox,outbox}'").await;
    let sleepers = [
        sleeper_of(&db, instance(1), "'{inbox}'").await,
        sleeper_of(&db, instance(2), "'{perspective_event}'").await,
        sleeper_of(&db, instance(3), "'{outbox}'").await,
        sleeper_of(&db, instance(4), "'{inbox}'").await,
    ];
    let ids = [1, 2, 3, 4, 5, 6].map(instance);
    let mut listener = Listener::for_instances(db.direct_url(), &ids).await;
    let pass = async || {
        let mut rung = value::<Vec<Uuid>>(&client, &format!("select wh_pass_ring('{me}')")).await;
        rung.sort_unstable();
        rung
    };
    assert_eq!(pass().await, [ids[0], ids[2]], "one for each");
    assert_eq!(listener.rung().await, rings(&[(1, "inbox"), (3, "outbox")]));
    // Whoever is full is left out, and another one is asked; then there is no other.
    assert!(value::<bool>(&sleepers[0], &format!("select wh_set_full('{}', true)", ids[0])).await);
    assert_eq!(pass().await, [ids[2], ids[3]]);
    assert_eq!(listener.rung().await, rings(&[(3, "outbox"), (4, "inbox")]));
    run(&sleepers[3], "select pg_advisory_unlock_all()").await;
    assert_eq!(pass().await, [ids[2]], "who takes inbox rows is full or awake");
    assert_eq!(listener.rung().await, rings(&[(3, "outbox")]));
    // What it does not run itself cannot have rung it.
    declare(&client, me, "'{inbox}'").await;
    assert_eq!(pass().await, Vec::<Uuid>::new());
    declare(&client, me, "'{}'").await;
    assert_eq!(pass().await, Vec::<Uuid>::new());
    assert_eq!(listener.rung().await, []);
    declare(&client, me, "null").await;
    assert_eq!(pass().await, [ids[1], ids[2]]);
    assert_eq!(listener.rung().await, rings(&[(2, "perspective_event"), (3, "outbox")]));
    // One that runs several stands for all of them: it is the next one after the caller.
    let _all = sleeper_of(&db, ids[5], "null").await;
    assert_eq!(pass().await, [ids[5]]);
    declare(&client, ids[5], "'{inbox,receptor}'").await;
    declare(&client, me, "'{outbox,inbox,receptor}'").await;
    assert_eq!(pass().await, [ids[2], ids[5]]);
    assert_eq!(listener.rung().await, rings(&[(3, "outbox"), (6, "inbox"), (6, "outbox")]));
}

#[tokio::test]
async fn a_category_that_does_not_exist_is_no_declaration() {
    let db = common::database().await;
    let client = db.connect().await;
    super::beat(&client, instance(1)).await;
    // By hand too: a misspelt one would never be rung.
    let (code, ..) = refused(&client, "update wh_service_instances set categories = '{out_box}'").await;
    assert_eq!(code, "23514");
}
