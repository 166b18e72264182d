//! Doorbells: who sleeps and should wake is rung, nobody else, and no commit slips by.

mod common;
mod sql;

#[path = "doorbell_sql/categories.rs"]
mod categories;

use sql::{Listener, beat, column, instance, member, refused, rings, run, stream, until_waiting, value};
use tokio_postgres::Client;
use uuid::Uuid;

/// A member that sleeps: its session, which no pooler may share, holds the arm lock.
async fn sleeper(db: &common::Database, id: Uuid) -> Client {
    let client = db.connect_direct().await;
    assert!(beat(&client, id).await);
    assert!(value::<bool>(&client, &format!("select pg_try_advisory_lock(wh_arm_key('{id}'))")).await);
    client
}

fn put(items: &[Option<Uuid>]) -> String {
    let items: Vec<String> = items
        .iter()
        .map(|stream| {
            let stream = stream.map(|stream| format!(r#", "stream_id": "{stream}""#)).unwrap_or_default();
            format!(r#"{{"message_type": "t", "payload": 1{stream}}}"#)
        })
        .collect();
    format!("select store_outbox_messages('[{}]')", items.join(","))
}

async fn assign(client: &Client, stream: Uuid, owner: Uuid) {
    run(client, &format!(
        "insert into wh_active_streams (stream_id, assigned_instance_id, lease_expiry) values ('{stream}', '{owner}', clock_timestamp() + interval '1 min') \
         on conflict (stream_id) do update set assigned_instance_id = excluded.assigned_instance_id"
    )).await;
}

/// A stream that falls to the nth of `count` members by partition.
async fn stream_of_share(client: &Client, count: i32, n: i32) -> Uuid {
    for candidate in 1000.. {
        let stream = stream(candidate);
        if value::<i32>(client, &format!("select compute_partition('{stream}') % {count}")).await == n {
            return stream;
        }
    }
    unreachable!()
}

#[tokio::test]
async fn a_channel_fits_what_postgres_allows_and_names_its_schema() {
    let db = common::database().await;
    // It listens.
    let client = db.connect_direct().await;
    let channel: String = value(&client, &format!("select wh_work_channel('{}')", instance(1))).await;
    assert_eq!(channel, format!("wh_work_{}", instance(1)));
    let schema = "a schema with a rather long name";
    workpump::migrate(db.url(), schema).await.unwrap();
    let tagged: String =
        value(&client, &format!("select \"{schema}\".wh_work_channel('{}')", instance(1))).await;
    assert!(
        tagged.len() <= 63 && tagged.starts_with("wh_work_") && tagged.ends_with(&instance(1).to_string()),
        "{tagged}"
    );
    assert_ne!(tagged, channel);
    run(&client, &format!("listen \"{tagged}\"; select pg_notify('{tagged}', 'outbox')")).await;
    assert_eq!(value::<String>(&client, "select pg_listening_channels()").await, tagged);
    let keys = format!(
        "select count(distinct k) from unnest(array[wh_alive_key('{0}'), wh_arm_key('{0}'), wh_member_key('{0}'), wh_full_key('{0}'), \
        \"{schema}\".wh_alive_key('{0}'), \"{schema}\".wh_arm_key('{0}'), \"{schema}\".wh_full_key('{0}'), wh_alive_key('{1}'), wh_arm_key('{1}')]) k",
        instance(1),
        instance(2)
    );
    assert_eq!(value::<i64>(&client, &keys).await, 9, "no two purposes share a key");
}

#[tokio::test]
async fn a_sleeper_is_rung_once_per_transaction_and_one_awake_is_not() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    run(&producer, &put(&[Some(stream(1))])).await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox")]));
    // Still asleep: as long as nobody took the lock back every commit rings, however much is pending.
    run(&producer, &format!("begin; {}; {}; commit", put(&[Some(stream(1)), None]), put(&[Some(stream(1))])))
        .await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox")]));
    run(&consumer, &format!("select pg_advisory_unlock(wh_arm_key('{me}'))")).await;
    run(&producer, &put(&[Some(stream(1)), None])).await;
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn nobody_falls_asleep_while_an_unrung_producer_is_open() {
    let db = common::database().await;
    // The consumer's lock is one of its session.
    let (producer, consumer, watcher) = (db.connect().await, db.connect_direct().await, db.connect().await);
    let me = instance(1);
    beat(&consumer, me).await;
    for level in ["read committed", "repeatable read", "serializable"] {
        run(&producer, &format!("begin isolation level {level}; {}", put(&[Some(stream(1))]))).await;
        let arm = format!("select pg_try_advisory_lock(wh_arm_key('{me}'))");
        assert!(!value::<bool>(&consumer, &arm).await, "{level}");
        // It queues for the lock; from then on every other producer rings.
        let consumer_pid = sql::pid(&consumer).await;
        let queued = format!("select pg_advisory_lock(wh_arm_key('{me}'))");
        let commit = async {
            until_waiting(&watcher, consumer_pid).await;
            run(&producer, "commit").await;
        };
        let ((), ()) = futures_util::future::join(run(&consumer, &queued), commit).await;
        assert!(
            value::<i64>(&consumer, "select count(*) from wh_outbox where claimable_at is null").await > 0,
            "{level}: granted after the rows are visible"
        );
        run(&consumer, "select pg_advisory_unlock_all()").await;
    }
}

#[tokio::test]
async fn a_producer_that_rolls_back_rings_nobody() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    run(&producer, &format!("begin; {}; rollback", put(&[None]))).await;
    run(&producer, &format!("begin; savepoint s; {}; rollback to s; commit", put(&[None]))).await;
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn a_row_scheduled_for_later_rings_too_and_neither_update_nor_delete_does() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    let item = |more: &str| format!(r#"{{"message_type": "t", "payload": 1, "scheduled_for": {more}}}"#);
    let ordered = item(&format!(r#""2100-01-01T00:00:00Z", "stream_id": "{}""#, stream(7)));
    let unordered = item(r#""infinity""#);
    // Who sleeps until the next due time has to learn that there is an earlier one.
    for items in [ordered.clone(), unordered.clone(), format!("{ordered}, {unordered}")] {
        run(&producer, &format!("select store_outbox_messages('[{items}]')")).await;
        assert_eq!(listener.rung().await, rings(&[(1, "outbox")]), "{items}");
    }
    assert_eq!(
        value::<i64>(&producer, "select count(*) from wh_active_streams").await,
        1,
        "its stream is noted all the same"
    );
    run(&producer, "update wh_outbox set scheduled_for = null; delete from wh_outbox; insert into wh_outbox (message_type, payload) select 't', '1' where false").await;
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn every_category_names_itself() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    let id = stream(1);
    run(&producer, &format!(
        "begin; {}; select store_inbox_messages('[{{\"message_type\": \"t\", \"payload\": 1}}]'); \
         select store_perspective_events('[{{\"stream_id\": \"{id}\", \"perspective_name\": \"p\", \"event_id\": \"{id}\"}}]'); \
         select store_receptor_work('[{{\"receptor_name\": \"r\", \"event_id\": \"{id}\"}}]'); commit",
        put(&[None])
    )).await;
    assert_eq!(
        listener.rung().await,
        rings(&[(1, "inbox"), (1, "outbox"), (1, "perspective_event"), (1, "receptor")])
    );
}

#[tokio::test]
async fn the_owner_of_a_stream_is_rung_else_its_share_and_never_the_dead_or_the_full() {
    let db = common::database().await;
    let producer = db.connect().await;
    let ids = [1, 2, 3].map(instance);
    let mut sleepers = Vec::new();
    for id in ids {
        sleepers.push(sleeper(&db, id).await);
    }
    let mut listener = Listener::for_instances(db.direct_url(), &ids).await;
    let share_of_first = stream_of_share(&producer, 3, 0).await;
    let (owned, dead_owner) = (stream(1), stream_of_share(&producer, 3, 1).await);
    assign(&producer, owned, ids[2]).await;
    assign(&producer, dead_owner, instance(99)).await;
    run(&producer, &put(&[Some(owned)])).await;
    assert_eq!(listener.rung().await, rings(&[(3, "outbox")]));
    run(&producer, &put(&[Some(owned), Some(share_of_first)])).await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox"), (3, "outbox")]));
    run(&producer, &put(&[Some(dead_owner)])).await;
    assert_eq!(listener.rung().await, rings(&[(2, "outbox")]), "the owner is no member");
    // Stale and without a lock, then alive but taking no work: both fall out of the count.
    run(&producer, &format!("update wh_service_instances set last_heartbeat_at = clock_timestamp() - interval '40 s' where instance_id = '{}'", ids[2])).await;
    run(
        &producer,
        &format!("update wh_service_instances set accepts_work = false where instance_id = '{}'", ids[1]),
    )
    .await;
    run(&producer, &put(&[Some(owned), Some(share_of_first), Some(dead_owner)])).await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox")]));
    // The lock alone keeps a late beater in the count.
    run(&sleepers[2], &format!("select claim_instance_alive_lock('{}')", ids[2])).await;
    run(&producer, &put(&[Some(owned)])).await;
    assert_eq!(listener.rung().await, rings(&[(3, "outbox")]));
}

#[tokio::test]
async fn unordered_rows_of_a_category_are_one_queue_with_one_taker() {
    let db = common::database().await;
    let producer = db.connect().await;
    let ids = [1, 2, 3].map(instance);
    let mut sleepers = Vec::new();
    for id in ids {
        sleepers.push(sleeper(&db, id).await);
    }
    let mut listener = Listener::for_instances(db.direct_url(), &ids).await;
    run(&producer, &put(&[None; 100])).await;
    assert_eq!(listener.rung().await.len(), 1);
}

#[tokio::test]
async fn without_anybody_alive_storing_is_silent() {
    let db = common::database().await;
    let producer = db.connect().await;
    let mut listener = Listener::for_instances(db.direct_url(), &[instance(1)]).await;
    run(&producer, &put(&[None, Some(stream(1))])).await;
    member(&producer, instance(1), 40).await;
    run(&producer, &put(&[None, Some(stream(1))])).await;
    assert_eq!(
        value::<i32>(
            &producer,
            &format!("select notify_instance_owners('outbox', array['{}'::uuid])", stream(1))
        )
        .await,
        0
    );
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn the_bell_by_hand_rings_owners_and_shares_asleep_or_not() {
    let db = common::database().await;
    let client = db.connect().await;
    let ids = [1, 2, 3].map(instance);
    for id in ids {
        beat(&client, id).await;
    }
    let mut listener = Listener::for_instances(db.direct_url(), &ids).await;
    assign(&client, stream(1), ids[1]).await;
    assign(&client, stream(2), ids[1]).await;
    let free = stream_of_share(&client, 3, 2).await;
    let ring = |category: &str, streams: &str| {
        format!("select notify_instance_owners('{category}', array[{streams}]::uuid[])")
    };
    let owned = format!("'{}', '{}'", stream(1), stream(2));
    assert_eq!(value::<i32>(&client, &ring("inbox", &owned)).await, 1);
    assert_eq!(listener.rung().await, rings(&[(2, "inbox")]), "all owned: no share is rung");
    assert_eq!(value::<i32>(&client, &ring("receptor", &format!("{owned}, '{free}'"))).await, 2);
    assert_eq!(listener.rung().await, rings(&[(2, "receptor"), (3, "receptor")]));
    assert_eq!(value::<i32>(&client, &ring("outbox", "null")).await, 0);
    assert_eq!(value::<i32>(&client, "select notify_instance_owners('outbox', null)").await, 0);
    assert_eq!(listener.rung().await, []);
    for (category, quoted) in [("'letters'", "'letters'"), ("null", "null")] {
        let (code, message, hint) =
            refused(&client, &format!("select notify_instance_owners({category}, '{{}}')")).await;
        assert_eq!(code, "WH002");
        assert!(message.contains(quoted) && hint.contains("perspective_event"), "{message}, {hint}");
    }
}

#[tokio::test]
async fn who_has_no_permits_passes_the_ring_to_a_sleeper() {
    let db = common::database().await;
    let client = db.connect().await;
    let ids = [1, 2, 3].map(instance);
    for id in ids {
        beat(&client, id).await;
    }
    let mut listener = Listener::for_instances(db.direct_url(), &ids).await;
    let pass = format!("select wh_pass_ring('{}')", ids[0]);
    assert_eq!(value::<Vec<Uuid>>(&client, &pass).await, Vec::<Uuid>::new());
    let asleep = sleeper(&db, ids[2]).await;
    assert_eq!(value::<Vec<Uuid>>(&client, &pass).await, [ids[2]]);
    assert_eq!(listener.rung().await, rings(&[(3, "outbox")]));
    // One that is full itself is rung by producers, and left out here: two of them would ring each other for ever.
    assert!(value::<bool>(&asleep, &format!("select wh_set_full('{}', true)", ids[2])).await);
    assert_eq!(value::<Vec<Uuid>>(&client, &pass).await, Vec::<Uuid>::new());
    let _also = sleeper(&db, ids[1]).await;
    assert_eq!(value::<Vec<Uuid>>(&client, &pass).await, [ids[1]]);
    assert!(value::<bool>(&asleep, &format!("select wh_set_full('{}', false)", ids[2])).await);
    run(&client, &format!("delete from wh_service_instances where instance_id = '{}'", ids[1])).await;
    assert_eq!(value::<Vec<Uuid>>(&client, &pass).await, [ids[2]]);
    assert_eq!(listener.rung().await, rings(&[(2, "outbox"), (3, "outbox")]));
}

async fn advisory_locks(client: &Client, session: i32) -> i64 {
    value(client, &format!("select count(*) from pg_locks where locktype = 'advisory' and pid = {session}"))
        .await
}

#[tokio::test]
async fn arming_is_a_session_lock_that_is_counted_and_given_back() {
    let db = common::database().await;
    // Arm locks are of sessions, here and below.
    let (consumer, watcher) = (db.connect_direct().await, db.connect_direct().await);
    let (me, pid) = (instance(1), sql::pid(&consumer).await);
    for (full, locks) in [(false, 1), (true, 2)] {
        assert!(value::<bool>(&consumer, &format!("select wh_arm('{me}', 0, {full})")).await);
        assert_eq!(advisory_locks(&watcher, pid).await, locks);
        assert!(!value::<bool>(&watcher, &format!("select wh_arm('{me}')")).await, "one at a time");
        run(&consumer, &format!("select wh_disarm('{me}', {full})")).await;
        assert_eq!(advisory_locks(&watcher, pid).await, 0);
    }
    for bad in ["null, 0, false", "'$me', -1, false", "'$me', null, false", "'$me', 1, null"] {
        let (code, message, hint) =
            refused(&consumer, &format!("select wh_arm({})", bad.replace("$me", &me.to_string()))).await;
        assert_eq!(code, "22023");
        assert!(message.contains("cannot be armed") && hint.contains("milliseconds"), "{message}, {hint}");
    }
}

#[tokio::test]
async fn waiting_for_the_lock_in_vain_is_no_error_and_leaves_no_setting_and_no_lock_behind() {
    let db = common::database().await;
    let (producer, consumer, watcher) = (db.connect().await, db.connect_direct().await, db.connect().await);
    let (me, pid) = (instance(1), sql::pid(&consumer).await);
    beat(&consumer, me).await;
    run(&producer, &format!("begin; {}", put(&[None]))).await;
    run(&consumer, "begin; set local lock_timeout = '7s'").await;
    for full in [false, true] {
        assert!(!value::<bool>(&consumer, &format!("select wh_arm('{me}', 0, {full})")).await);
        assert!(!value::<bool>(&consumer, &format!("select wh_arm('{me}', 30, {full})")).await);
    }
    assert_eq!(
        value::<String>(&consumer, "show lock_timeout").await,
        "7s",
        "no error: the transaction goes on"
    );
    run(&consumer, "commit").await;
    assert_eq!(advisory_locks(&watcher, pid).await, 0);
    // And granted when the producer ends, whoever rings meanwhile.
    let late = db.connect().await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    let queued = format!("select wh_arm('{me}', 60000)");
    let ends = async {
        until_waiting(&watcher, pid).await;
        run(&late, &put(&[None])).await;
        assert_eq!(listener.rung().await, rings(&[(1, "outbox")]), "a queued sleeper is rung already");
        run(&producer, "commit").await;
    };
    let (armed, ()) = futures_util::future::join(value::<bool>(&consumer, &queued), ends).await;
    assert!(armed);
    assert_eq!(value::<String>(&consumer, "show lock_timeout").await, "0");
}

#[tokio::test]
async fn a_full_sleeper_is_not_armed_when_somebody_looks_at_it_this_instant() {
    let db = common::database().await;
    let (client, consumer) = (db.connect().await, db.connect_direct().await);
    let me = instance(1);
    run(&client, &format!("begin; select pg_try_advisory_xact_lock_shared(wh_full_key('{me}'))")).await;
    assert!(!value::<bool>(&consumer, &format!("select wh_arm('{me}', 10, true)")).await);
    let pid = sql::pid(&consumer).await;
    assert_eq!(advisory_locks(&client, pid).await, 0, "all or nothing");
    run(&client, "commit").await;
    assert!(value::<bool>(&consumer, &format!("select wh_arm('{me}', 10, true)")).await);
}

#[tokio::test]
async fn a_two_phase_producer_skips_the_bell_by_a_setting() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    run(&producer, &format!("begin; {}", put(&[None]))).await;
    let (code, ..) = refused(&producer, &format!("prepare transaction '{}-rings'", db.name())).await;
    assert_eq!(code, "0A000", "PostgreSQL cannot prepare a NOTIFY");
    run(&producer, "rollback").await;
    run(
        &producer,
        &format!("begin; set local workpump.skip_doorbells = on; {}", put(&[None, Some(stream(1))])),
    )
    .await;
    run(&producer, &format!("prepare transaction '{0}-silent'", db.name())).await;
    run(&producer, &format!("commit prepared '{0}-silent'", db.name())).await;
    assert_eq!(value::<i64>(&producer, "select count(*) from wh_outbox").await, 2);
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn a_ring_carries_a_word_however_large_and_many_the_rows_are() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    run(&producer, &format!(
        "begin; insert into wh_outbox (message_type, payload, stream_id) \
             select 't', to_jsonb(repeat(md5(n::text), 32768)), '{}' from generate_series(1, 3) n; \
         insert into wh_outbox (message_type, payload, stream_id) \
             select 't', '1', case when n % 2 = 0 then gen_random_uuid() end from generate_series(1, 10000) n; \
         do $$ begin for n in 1..200 loop insert into wh_outbox (message_type, payload) values ('t', '1'); end loop; end $$; commit",
        stream(1)
    ))
    .await;
    let heard = listener.rung().await;
    assert_eq!(heard, rings(&[(1, "outbox")]), "one ring for the transaction");
    assert!(heard[0].1.len() <= 100);
}

#[tokio::test]
async fn a_listener_that_reads_nothing_does_not_fail_those_who_store() {
    let db = common::database().await;
    let producer = db.connect().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    // In a transaction a session is told nothing, and the queue cannot be cut short before what it has not read.
    run(&listener.client, "begin").await;
    for _ in 0..200 {
        run(&producer, &put(&[None, Some(stream(1))])).await;
    }
    assert!(value::<f64>(&producer, "select pg_notification_queue_usage()").await < 0.001, "a word each");
    run(&listener.client, "commit").await;
    let heard = listener.rung().await;
    assert!(!heard.is_empty() && heard.iter().all(|ring| *ring == rings(&[(1, "outbox")])[0]), "{heard:?}");
}

#[tokio::test]
async fn nobody_rings_into_a_queue_that_is_half_full() {
    let db = common::database().await;
    let client = db.connect_direct().await;
    let me = instance(1);
    let _consumer = sleeper(&db, me).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    // To fill the real one takes 4 GB; this database is told a figure instead.
    let usage = |share: f64| {
        format!(
            "create or replace function pg_catalog.pg_notification_queue_usage() returns double precision language sql as 'select {share}::float8'"
        )
    };
    run(&client, &usage(0.51)).await;
    run(&client, &put(&[None])).await;
    run(&client, &put(&[None, Some(stream(1))])).await;
    run(&client, "select wh_ring_members('orphan'), wh_ring_armed('orphan'), notify_instance_owners('inbox', array[gen_random_uuid()])").await;
    assert_eq!(
        value::<Vec<Uuid>>(&client, &format!("select wh_pass_ring('{}')", instance(2))).await,
        Vec::<Uuid>::new()
    );
    assert_eq!(value::<i64>(&client, "select count(*) from wh_outbox").await, 3);
    assert_eq!(listener.rung().await, []);
    run(&client, &usage(0.5)).await;
    // A session of its own: what was planned with a built-in function is not planned again when somebody replaces it.
    run(&db.connect_direct().await, &put(&[None])).await;
    assert_eq!(listener.rung().await, rings(&[(1, "outbox")]));
}

#[tokio::test]
async fn no_function_rules_out_scans_and_leaves_jit_on() {
    let db = common::database().await;
    // A scan that has no alternative then costs so much on paper that it is compiled: half a second for a look at one row.
    let found: Vec<String> = column(
        &db.connect().await,
        "select proname::text from pg_proc where 'enable_seqscan=off' = any (proconfig) and not 'jit=off' = any (proconfig)",
    )
    .await;
    assert_eq!(found, [""; 0]);
}

#[tokio::test]
async fn what_operators_settle_by_hand_rings_whoever_sleeps() {
    let db = common::database().await;
    let client = db.connect().await;
    let (asleep, other) = (instance(1), instance(2));
    let _consumer = sleeper(&db, asleep).await;
    assert!(beat(&client, other).await);
    let mut listener = Listener::for_instances(db.direct_url(), &[asleep]).await;
    for call in ["complete_work(#)", "fail_work(#, 'no')", "release_work(#)", "dead_letter_work(#, 'no')"] {
        run(&client, &format!("delete from wh_outbox; {}", put(&[Some(stream(1)), Some(stream(1))]))).await;
        // Whether that rings depends on whose share the stream is.
        let _ = listener.rung().await;
        let head = format!("select work_id || ', ' || claim_epoch from claim_work('{other}', 1)");
        let head: String = value(&client, &head).await;
        let (id, epoch) = head.split_once(", ").expect("an id and an epoch");
        let arguments = format!("'outbox', '{other}', array['{id}'::uuid], array[{epoch}::bigint]");
        let settled = format!("select count(*) from {}", call.replace('#', &arguments));
        assert_eq!(value::<i64>(&client, &settled).await, 0, "{call}: nothing was fenced");
        assert_eq!(listener.rung().await, rings(&[(1, "outbox")]), "{call}");
    }
}
