//! Storing: one answer per item, order kept inside a stream, and a mistake is named instead of stored.

mod common;
mod sql;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use sql::{column, refused, run, stream, value};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{NewOutbox, Producer};

/// Calls a store function; (id, new) per item.
async fn store(client: &Client, function: &str, items: &str) -> Vec<(Uuid, bool)> {
    let sql = format!("select * from {function}('{items}')");
    let rows = client.query_typed(&sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn uuid(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

#[tokio::test]
async fn a_message_gets_defaults_and_keeps_every_field_given() {
    let db = common::database().await;
    let client = db.connect().await;
    let items = format!(
        r#"[{{"message_type": "plain", "payload": null}},
            {{"message_id": "{}", "stream_id": "{}", "destination": "d", "message_type": "full", "payload": {{"a": [1]}}, "metadata": {{"m": 1}}, "scheduled_for": "2100-01-01T00:00:00Z"}},
            {{"message_type": "nulls", "payload": 0, "message_id": null, "stream_id": null, "destination": null, "metadata": null, "scheduled_for": null}}]"#,
        uuid(1),
        stream(1)
    );
    let stored = store(&client, "store_outbox_messages", &items).await;
    assert_eq!(stored.len(), 3);
    assert_eq!(stored[1], (uuid(1), true));
    let rows: Vec<String> = column(&client, "select concat_ws('|', message_type, payload, coalesce(destination, '-'), coalesce(stream_id::text, '-'), coalesce(metadata::text, '-'), \
        coalesce(partition_number::text, '-'), scheduled_for is not null, instance_id is null, claim_epoch, attempts) from wh_outbox order by message_type").await;
    let share: i32 = value(&client, &format!("select compute_partition('{}')", stream(1))).await;
    assert_eq!(
        rows,
        [
            format!("full|{{\"a\": [1]}}|d|{}|{{\"m\": 1}}|{share}|t|t|0|0", stream(1)),
            "nulls|0|-|-|-|-|f|t|0|0".to_owned(),
            "plain|null|-|-|-|-|f|t|0|0".to_owned(),
        ]
    );
}

#[tokio::test]
async fn a_message_stored_before_is_an_answer_in_its_place() {
    let db = common::database().await;
    let client = db.connect().await;
    for function in ["store_outbox_messages", "store_inbox_messages"] {
        let item = |n| format!(r#"{{"message_id": "{}", "message_type": "t", "payload": {n}}}"#, uuid(n));
        assert_eq!(store(&client, function, &format!("[{}]", item(2))).await, [(uuid(2), true)]);
        let again =
            store(&client, function, &format!("[{}, {}, {}, {}]", item(3), item(2), item(1), item(3))).await;
        assert_eq!(
            again,
            [(uuid(3), true), (uuid(2), false), (uuid(1), true), (uuid(3), false)],
            "{function}"
        );
        assert_eq!(store(&client, function, "[]").await, []);
    }
    assert_eq!(value::<i64>(&client, "select count(*) from wh_outbox").await, 3);
}

#[tokio::test]
async fn the_inbox_remembers_a_message_after_its_row_is_gone() {
    let db = common::database().await;
    let client = db.connect().await;
    let items = format!(
        r#"[{{"message_id": "{}", "message_type": "t", "payload": 1, "handler_name": "h"}}]"#,
        uuid(1)
    );
    assert_eq!(store(&client, "store_inbox_messages", &items).await, [(uuid(1), true)]);
    run(&client, "delete from wh_inbox").await;
    assert_eq!(store(&client, "store_inbox_messages", &items).await, [(uuid(1), false)]);
    assert_eq!(value::<i64>(&client, "select count(*) from wh_inbox").await, 0);
    // A row that came by plain INSERT is no error either.
    run(
        &client,
        &format!("insert into wh_inbox (message_id, message_type, payload) values ('{}', 't', '1')", uuid(2)),
    )
    .await;
    let items = items.replace(&uuid(1).to_string(), &uuid(2).to_string());
    assert_eq!(store(&client, "store_inbox_messages", &items).await, [(uuid(2), false)]);
}

#[tokio::test]
async fn the_order_of_the_array_is_the_order_in_the_stream() {
    let db = common::database().await;
    let client = db.connect().await;
    let items: Vec<String> = (0..60)
        .map(|n| {
            format!(
                r#"{{"message_type": "{n}", "payload": 1, "stream_id": "{}", "message_id": "{}"}}"#,
                stream(n % 3),
                uuid(1000 - n)
            )
        })
        .collect();
    store(&client, "store_outbox_messages", &format!("[{}]", items.join(","))).await;
    for s in 0..3 {
        let order: Vec<String> = column(
            &client,
            &format!("select message_type from wh_outbox where stream_id = '{}' order by seq", stream(s)),
        )
        .await;
        let expected: Vec<String> = (0..60).filter(|n| n % 3 == s).map(|n| n.to_string()).collect();
        assert_eq!(order, expected);
    }
}

#[tokio::test]
async fn perspective_and_receptor_work_keep_the_id_they_have() {
    let db = common::database().await;
    let client = db.connect().await;
    let event = |n: u128, name: &str, s: u128| {
        format!(
            r#"{{"stream_id": "{}", "perspective_name": "{name}", "event_id": "{}"}}"#,
            stream(s),
            uuid(n)
        )
    };
    let first = store(
        &client,
        "store_perspective_events",
        &format!("[{}, {}, {}]", event(1, "p", 1), event(1, "q", 1), event(1, "p", 1)),
    )
    .await;
    assert_eq!(first.iter().map(|(_, new)| *new).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(first[0].0, first[2].0);
    let second =
        store(&client, "store_perspective_events", &format!("[{}, {}]", event(2, "p", 1), event(1, "q", 1)))
            .await;
    assert_eq!(second[1], (first[1].0, false));
    assert!(second[0].1);
    let receptor =
        |n: u128, more: &str| format!(r#"[{{"receptor_name": "r", "event_id": "{}"{more}}}]"#, uuid(n));
    let one = store(&client, "store_receptor_work", &receptor(1, &format!(r#", "id": "{}""#, uuid(7)))).await;
    assert_eq!(one, [(uuid(7), true)]);
    assert_eq!(store(&client, "store_receptor_work", &receptor(1, "")).await, [(uuid(7), false)]);
    // An id that is taken by other work is an error, not a loss.
    let (code, ..) = refused(
        &client,
        &format!("select store_receptor_work('{}')", receptor(2, &format!(r#", "id": "{}""#, uuid(7)))),
    )
    .await;
    assert_eq!(code, "23505");
}

/// Function, items, and what the message must contain. `GOOD`, `ZERO` and `ONE` stand for a good item and two uuids.
const MISTAKES: &[(&str, &str, &[&str])] = &[
    ("store_outbox_messages", "null", &["not an array"]),
    ("store_outbox_messages", "{}", &["object", "not an array"]),
    ("store_outbox_messages", "[GOOD, 4]", &["item 1", "number", "not an object"]),
    (
        "store_outbox_messages",
        r#"[GOOD, {"message_type": "t", "paylod": 1}]"#,
        &["item 1", "unknown field \"paylod\""],
    ),
    ("store_outbox_messages", r#"[GOOD, {"message_type": "t"}]"#, &["item 1", "lacks the field \"payload\""]),
    ("store_outbox_messages", r#"[{"payload": 1}]"#, &["item 0", "lacks the field \"message_type\""]),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": null}]"#,
        &["item 0", "lacks the field \"message_type\""],
    ),
    ("store_outbox_messages", r#"[{"payload": 1, "message_type": 5}]"#, &["item 0", "message_type", ": 5 "]),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": ""}]"#,
        &["item 0", "message_type", "empty"],
    ),
    (
        "store_inbox_messages",
        r#"[{"payload": 1, "message_type": "t", "destination": "d"}]"#,
        &["item 0", "unknown field \"destination\""],
    ),
    (
        "store_inbox_messages",
        r#"[{"payload": 1, "message_type": "t", "handler_name": {}}]"#,
        &["item 0", "handler_name", "{}"],
    ),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": "t", "stream_id": "x-1"}]"#,
        &["item 0", "stream_id", "\"x-1\""],
    ),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": "t", "stream_id": "ZERO"}]"#,
        &["item 0", "stream_id", "all-zero"],
    ),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": "t", "message_id": 12345678123456781234567812345678}]"#,
        &["item 0", "message_id", "not a string"],
    ),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": "t", "scheduled_for": "soon"}]"#,
        &["item 0", "scheduled_for", "\"soon\""],
    ),
    (
        "store_outbox_messages",
        r#"[{"payload": 1, "message_type": "t", "scheduled_for": 20300101}]"#,
        &["item 0", "scheduled_for", "20300101"],
    ),
    (
        "store_perspective_events",
        r#"[{"perspective_name": "p", "event_id": "ONE"}]"#,
        &["item 0", "lacks the field \"stream_id\""],
    ),
    (
        "store_perspective_events",
        r#"[{"perspective_name": "p", "event_id": "ZERO", "stream_id": "ONE"}]"#,
        &["item 0", "event_id", "all-zero"],
    ),
    ("store_receptor_work", r#"[{"event_id": "ONE"}]"#, &["item 0", "lacks the field \"receptor_name\""]),
    ("store_receptor_work", r#"[{"receptor_name": "r", "event_id": "z"}]"#, &["item 0", "event_id", "\"z\""]),
];

#[tokio::test]
async fn a_mistake_is_named_with_its_field_and_place_and_nothing_is_stored() {
    let db = common::database().await;
    let client = db.connect().await;
    for (function, items, parts) in MISTAKES {
        let items = items.replace("GOOD", r#"{"message_type": "t", "payload": 1}"#);
        let items = items.replace("ZERO", &uuid(0).to_string()).replace("ONE", &uuid(1).to_string());
        let (code, message, hint) = refused(&client, &format!("select {function}('{items}')")).await;
        assert_eq!(code, "22023", "{items}: {message}");
        assert!(message.starts_with(function), "{message}");
        for part in *parts {
            assert!(message.contains(part), "{items}: {part:?} is not in {message:?}");
        }
        assert!(!hint.is_empty() && !hint.contains("defect"), "{items}: {hint}");
    }
    let (code, ..) = refused(&client, "select store_outbox_messages(null)").await;
    assert_eq!(code, "22023");
    for table in [
        "wh_outbox",
        "wh_inbox",
        "wh_perspective_events",
        "wh_receptor_processing",
        "wh_active_streams",
        "wh_message_deduplication",
    ] {
        assert_eq!(value::<i64>(&client, &format!("select count(*) from {table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn the_all_zero_stream_is_refused_for_a_plain_insert_too() {
    let db = common::database().await;
    let client = db.connect().await;
    let (code, ..) = refused(
        &client,
        &format!("insert into wh_outbox (message_type, payload, stream_id) values ('t', '1', '{}')", uuid(0)),
    )
    .await;
    assert_eq!(code, "23514");
    run(
        &client,
        &format!(
            "insert into wh_outbox (message_type, payload, stream_id) values ('t', '1', '{}')",
            stream(1)
        ),
    )
    .await;
    assert_eq!(
        value::<i64>(&client, "select count(*) from wh_active_streams").await,
        1,
        "a plain INSERT is noted as well"
    );
}

#[tokio::test]
async fn new_streams_are_noted_once_and_producers_in_opposite_order_do_not_deadlock() {
    let db = common::database().await;
    let (one, two) = (db.connect().await, db.connect().await);
    let put = |s: u128| {
        format!(
            "select store_outbox_messages('[{{\"message_type\": \"t\", \"payload\": 1, \"stream_id\": \"{}\"}}]')",
            stream(s)
        )
    };
    run(&one, "set deadlock_timeout = '10ms'; set statement_timeout = '60s'; begin").await;
    run(&two, "set deadlock_timeout = '10ms'; set lock_timeout = '5s'; begin").await;
    run(&one, &put(1)).await;
    run(&two, &put(2)).await;
    run(&one, &put(2)).await;
    run(&two, &put(1)).await;
    run(&one, "commit").await;
    run(&two, "commit").await;
    assert_eq!(value::<i64>(&one, "select count(*) from wh_active_streams").await, 2);
    run(&one, &put(1)).await;
    assert_eq!(value::<i64>(&one, "select count(*) from wh_active_streams").await, 2);
}

#[tokio::test]
async fn a_repeatable_read_producer_is_not_failed_by_a_stream_that_came_meanwhile() {
    let db = common::database().await;
    let (one, two) = (db.connect().await, db.connect().await);
    let put = format!(
        "select store_outbox_messages('[{{\"message_type\": \"t\", \"payload\": 1, \"stream_id\": \"{}\"}}]')",
        stream(1)
    );
    run(&one, "begin isolation level repeatable read; select 1").await;
    run(&two, &put).await;
    run(&one, &format!("{put}; commit")).await;
    assert_eq!(value::<i64>(&one, "select count(*) from wh_outbox").await, 2);
}

/// Items of all four functions, with whatever makes them unique given.
fn unique(function: &str, n: u128) -> String {
    let (id, s) = (uuid(1 + n), stream(n % 5));
    match function {
        "store_perspective_events" => {
            format!(r#"{{"stream_id": "{s}", "perspective_name": "p", "event_id": "{id}"}}"#)
        }
        "store_receptor_work" => {
            format!(r#"{{"stream_id": "{s}", "receptor_name": "r", "event_id": "{id}"}}"#)
        }
        _ => format!(r#"{{"message_id": "{id}", "message_type": "t", "payload": {n}, "stream_id": "{s}"}}"#),
    }
}

#[tokio::test]
async fn producers_of_the_same_messages_in_any_order_store_each_once_and_nobody_deadlocks() {
    let db = common::database().await;
    let clients = [db.connect().await, db.connect().await, db.connect().await];
    for client in &clients {
        run(client, "set deadlock_timeout = '10ms'").await;
    }
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..40_u128 {
        for function in [
            "store_outbox_messages",
            "store_inbox_messages",
            "store_perspective_events",
            "store_receptor_work",
        ] {
            let mut items: Vec<String> = (0..100).map(|n| unique(function, round * 100 + n)).collect();
            let calls = clients.each_ref().map(|client| {
                items.shuffle(&mut random);
                let items = format!("[{}]", items.join(","));
                async move { store(client, function, &items).await }
            });
            let answers = futures_util::future::join_all(calls).await;
            assert_eq!(answers.iter().flatten().filter(|(_, new)| *new).count(), 100, "{function}");
        }
    }
}

#[tokio::test]
async fn library_producers_of_the_same_messages_in_any_order_do_not_deadlock_and_keep_their_order() {
    let db = common::database().await;
    let clients = [db.connect().await, db.connect().await, db.connect().await];
    for client in &clients {
        run(client, "set deadlock_timeout = '10ms'").await;
    }
    let producer = Producer::new("public").unwrap();
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..40_u128 {
        let mut ids: Vec<u128> = (0..100).map(|n| 1 + round * 100 + n).collect();
        let calls = clients.each_ref().map(|client| {
            ids.shuffle(&mut random);
            let mine = ids.clone();
            let batch: Vec<_> = mine
                .iter()
                .zip(0..)
                .map(|(id, place)| NewOutbox::new("t", &place).id(uuid(*id)).stream(stream(id % 3)))
                .collect();
            let producer = &producer;
            async move { (mine, producer.outbox(client, &batch).await.unwrap()) }
        });
        let answers = futures_util::future::join_all(calls).await;
        let mut new = 0;
        for (order, stored) in &answers {
            assert!(
                stored.stored.iter().map(|s| s.message_id).eq(order.iter().map(|id| uuid(*id))),
                "answers in the caller's order"
            );
            new += stored.new_messages();
        }
        assert_eq!(new, 100);
    }
    // What one batch stored stands in its order: the payload is the place. The batches of a round do not mix inside a stream's numbers
    // otherwise than as wholes, so it is enough to look at each transaction.
    let broken: i64 = value(
        &clients[0],
        "select count(*) from (select payload::int - lag(payload::int) over (partition by xmin::text, stream_id order by seq) as step from wh_outbox) s where step <= 0",
    )
    .await;
    assert_eq!(broken, 0);
}

#[tokio::test]
async fn two_deliveries_of_one_batch_in_opposite_order_store_each_message_once() {
    let db = common::database().await;
    let (one, two) = (db.connect().await, db.connect().await);
    for round in 0..20_u128 {
        let mut items: Vec<String> = (0..50)
            .map(|n| {
                format!(
                    r#"{{"message_id": "{}", "message_type": "t", "payload": 1}}"#,
                    uuid(1 + round * 50 + n)
                )
            })
            .collect();
        let forward = format!("[{}]", items.join(","));
        items.reverse();
        let backward = format!("[{}]", items.join(","));
        let (a, b) = futures_util::future::join(
            store(&one, "store_inbox_messages", &forward),
            store(&two, "store_inbox_messages", &backward),
        )
        .await;
        assert_eq!(a.iter().chain(&b).filter(|(_, new)| *new).count(), 50);
    }
    assert_eq!(value::<i64>(&one, "select count(*) from wh_inbox").await, 1000);
}
