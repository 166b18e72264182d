//! Beats and liveness: who is a member, who is alive, and that a dead one never comes back under its id.

mod common;
mod sql;

use sql::{Listener, beat, column, instance, is_member, member, refused, rings, run, until_waiting, value};
use uuid::Uuid;

#[tokio::test]
async fn the_first_beat_inserts_and_the_next_only_moves_the_clock() {
    let db = common::database().await;
    let client = db.connect().await;
    let me = instance(1);
    assert!(
        value::<bool>(
            &client,
            &format!("select record_heartbeat('{me}', 'svc', 'host', 42, '{{\"a\": 1}}', 30, true, false, '{{inbox,outbox}}')")
        )
        .await
    );
    let row = "select concat_ws(' ', service_name, host_name, process_id, metadata, heartbeat_interval_seconds, lock_declared, accepts_work, categories) from wh_service_instances";
    assert_eq!(value::<String>(&client, row).await, "svc host 42 {\"a\": 1} 30 t f {inbox,outbox}");
    run(&client, "create table before as select * from wh_service_instances").await;
    assert!(beat(&client, me).await);
    let moved = "select n.started_at = b.started_at and n.last_heartbeat_at > b.last_heartbeat_at and n.metadata = b.metadata \
                 and n.heartbeat_interval_seconds is null and not n.lock_declared and n.accepts_work and n.categories is null from wh_service_instances n, before b";
    assert!(value::<bool>(&client, moved).await);
}

#[tokio::test]
async fn a_beat_inside_a_long_transaction_is_as_new_as_its_call() {
    let db = common::database().await;
    let client = db.connect().await;
    run(&client, "begin").await;
    let before: std::time::SystemTime = value(&client, "select clock_timestamp()").await;
    beat(&client, instance(1)).await;
    let beaten: std::time::SystemTime =
        value(&client, "select last_heartbeat_at from wh_service_instances").await;
    assert!(beaten > before);
}

#[tokio::test]
async fn wrong_arguments_are_named() {
    let db = common::database().await;
    let client = db.connect().await;
    let (code, message, hint) = refused(&client, "select record_heartbeat(null, 's', 'h', 1)").await;
    assert_eq!(
        (code.as_str(), message.contains("p_instance_id is null"), hint.is_empty()),
        ("22023", true, false)
    );
    let (code, message, _) =
        refused(&client, &format!("select record_heartbeat('{}', 's', 'h', 1, null, -3)", instance(1))).await;
    assert_eq!((code.as_str(), message.contains("p_interval_seconds is -3")), ("22023", true), "{message}");
    for (bad, said) in [("{letters,inbox}", "{letters,inbox}"), ("{null}", "{NULL}")] {
        let sql = format!("select record_heartbeat('{}', 's', 'h', 1, p_categories => '{bad}')", instance(1));
        let (code, message, hint) = refused(&client, &sql).await;
        assert_eq!(
            (code.as_str(), message.contains(said), hint.contains("receptor")),
            ("WH002", true, true),
            "{message}"
        );
    }
    let (code, message, _) = refused(&client, "select cleanup_stale_instances(null)").await;
    assert_eq!((code.as_str(), message.contains("p_stale_cutoff is null")), ("22023", true), "{message}");
}

#[tokio::test]
async fn a_beat_sweeps_a_peer_of_31_seconds_and_never_itself() {
    let db = common::database().await;
    let client = db.connect().await;
    // 5 s between the age of the living and the limit: the time a busy machine has to come to the beat.
    for (id, age) in [(1, 400), (2, 31), (3, 25)] {
        member(&client, instance(id), age).await;
    }
    assert!(beat(&client, instance(1)).await);
    assert!(is_member(&client, instance(1)).await && is_member(&client, instance(3)).await);
    assert!(!is_member(&client, instance(2)).await);
    let others =
        format!("select wh_evict_stale('{}', clock_timestamp() + interval '1 h', null)", instance(3));
    run(&client, "begin").await;
    assert_eq!(column::<Uuid>(&client, &others).await, [instance(1)], "everybody but itself");
    run(&client, "rollback").await;
    let tombstone: String = value(&client, "select instance_id || ' by ' || evicted_by || ': ' || reason from wh_instance_evictions where released_at is not null").await;
    assert_eq!(tombstone, format!("{} by {}: stale heartbeat", instance(2), instance(1)));
}

#[tokio::test]
async fn a_declared_interval_counts_twice_and_five_seconds_more() {
    let db = common::database().await;
    let client = db.connect().await;
    // The living are as old as two beats: 5 s until the limit, the time a busy machine has to come to the beat.
    for (id, age, declared) in
        [(2, 60, "30"), (3, 66, "30"), (4, 120, "60"), (5, 126, "60"), (6, 25, "5"), (7, 31, "5")]
    {
        member(&client, instance(id), age).await;
        run(&client, &format!("update wh_service_instances set heartbeat_interval_seconds = {declared} where instance_id = '{}'", instance(id))).await;
    }
    for (id, alive) in [(2, true), (3, false), (4, true), (5, false), (6, true), (7, false)] {
        assert_eq!(
            value::<bool>(&client, &format!("select is_instance_alive('{}')", instance(id))).await,
            alive,
            "{id}"
        );
    }
    beat(&client, instance(1)).await;
    let left: Vec<Uuid> = column(&client, "select instance_id from wh_service_instances order by 1").await;
    assert_eq!(left, [1, 2, 4, 6].map(instance));
}

#[tokio::test]
async fn a_held_lock_keeps_a_peer_for_five_minutes_and_no_longer() {
    let db = common::database().await;
    // Both hold alive-locks, which are of sessions.
    let (client, holder) = (db.connect_direct().await, db.connect_direct().await);
    for (id, age) in [(2, 90), (3, 301)] {
        member(&client, instance(id), age).await;
        assert!(
            value::<bool>(&holder, &format!("select claim_instance_alive_lock('{}')", instance(id))).await
        );
    }
    // A lock of the sweeping session itself counts as well.
    member(&client, instance(4), 90).await;
    assert!(value::<bool>(&client, &format!("select claim_instance_alive_lock('{}')", instance(4))).await);
    beat(&client, instance(1)).await;
    assert!(is_member(&client, instance(4)).await);
    run(
        &client,
        &format!(
            "select pg_advisory_unlock_all(); delete from wh_service_instances where instance_id = '{}'",
            instance(4)
        ),
    )
    .await;
    assert!(is_member(&client, instance(2)).await);
    assert!(!is_member(&client, instance(3)).await);
    assert_eq!(value::<String>(&client, "select reason from wh_instance_evictions").await, "definitive-dead");
    // By hand, without a definitive cut-off, the lock decides at any age.
    run(&client, &format!("update wh_service_instances set last_heartbeat_at = clock_timestamp() - interval '1 day' where instance_id = '{}'", instance(2))).await;
    assert_eq!(
        column::<Uuid>(&client, "select cleanup_stale_instances(clock_timestamp() - interval '30 s')").await,
        Vec::<Uuid>::new()
    );
    run(&holder, "select pg_advisory_unlock_all()").await;
    assert_eq!(
        column::<Uuid>(&client, "select cleanup_stale_instances(clock_timestamp() - interval '30 s')").await,
        [instance(2)]
    );
}

#[tokio::test]
async fn alive_means_lock_or_heartbeat_in_this_database() {
    let (db, elsewhere) = (common::database().await, common::database().await);
    // Locks are of sessions; whoever asks about them may come through a pooler.
    let (client, holder, stranger) =
        (db.connect().await, db.connect_direct().await, elsewhere.connect_direct().await);
    for (id, age) in [(2, 100), (3, 1), (4, 1), (5, 100), (6, 100), (7, 100)] {
        member(&client, instance(id), age).await;
    }
    for (id, session) in [(1, &holder), (2, &holder), (4, &holder), (6, &stranger)] {
        assert!(
            value::<bool>(session, &format!("select claim_instance_alive_lock('{}')", instance(id))).await
        );
    }
    run(&holder, &format!("select pg_advisory_lock_shared(wh_alive_key('{}'))", instance(7))).await;
    // 1 lock only, no member; 2 lock, stale beat; 3 beat only; 4 both; 5 neither; 6 a lock in another database; 7 a watcher's shared lock; 8 nothing at all.
    for (id, alive) in
        [(1, true), (2, true), (3, true), (4, true), (5, false), (6, false), (7, false), (8, false)]
    {
        assert_eq!(
            value::<bool>(&client, &format!("select is_instance_alive('{}', 30)", instance(id))).await,
            alive,
            "{id}"
        );
        if (2..8).contains(&id) {
            assert_eq!(
                value::<bool>(
                    &client,
                    &format!("select alive from wh_live_instances where instance_id = '{}'", instance(id))
                )
                .await,
                alive,
                "{id} in the view"
            );
        }
    }
    assert!(value::<bool>(&client, &format!("select is_instance_alive('{}', 200)", instance(5))).await);
}

#[tokio::test]
async fn the_alive_lock_has_one_holder_and_goes_with_its_session() {
    let db = common::database().await;
    let (one, two) = (db.connect_direct().await, db.connect_direct().await);
    let claim = format!("select claim_instance_alive_lock('{}')", instance(1));
    let release = format!("select release_instance_alive_lock('{}')", instance(1));
    assert!(value::<bool>(&one, &claim).await);
    assert!(value::<bool>(&one, &claim).await, "asking again is no second lock");
    assert!(!value::<bool>(&two, &claim).await);
    assert!(!value::<bool>(&two, &release).await);
    assert!(value::<bool>(&one, &release).await);
    assert!(value::<bool>(&two, &claim).await);
    drop(two);
    sql::until(&one, &claim).await;
}

#[tokio::test]
async fn a_tombstoned_beat_is_refused_and_writes_nothing() {
    let db = common::database().await;
    let client = db.connect().await;
    let me = instance(1);
    assert!(beat(&client, me).await);
    assert!(
        value::<bool>(&client, &format!("select evict_instance('{me}', '{}', 'a test')", instance(9))).await
    );
    assert!(
        !value::<bool>(&client, &format!("select evict_instance('{me}', null, 'another')")).await,
        "the first record wins"
    );
    for _ in 0..2 {
        assert!(!beat(&client, me).await);
        assert!(
            !value::<bool>(&client, &format!("select register_instance_heartbeat('{me}', 's', 'h', 1)"))
                .await
        );
    }
    assert!(!is_member(&client, me).await);
    assert_eq!(value::<String>(&client, "select reason from wh_instance_evictions").await, "a test");
    let (code, ..) = refused(&client, &format!("select claim_work('{me}')")).await;
    assert_eq!(code, "WH001");
}

#[tokio::test]
async fn a_beat_that_meets_an_eviction_in_flight_never_resurrects() {
    let db = common::database().await;
    // The backend of the beat is looked at.
    let (beating, evicting, watcher) = (db.connect_direct().await, db.connect().await, db.connect().await);
    let beating_pid = sql::pid(&beating).await;
    for round in 0..150 {
        let me = instance(round);
        // Every third time the evicted one is no member yet: its first beat meets the eviction.
        if round % 3 > 0 {
            beat(&watcher, me).await;
        }
        run(&evicting, &format!("begin; select evict_instance('{me}', null, 'race')")).await;
        let verdict = beat(&beating, me);
        let commit = async {
            until_waiting(&watcher, beating_pid).await;
            run(&evicting, "commit").await;
        };
        let (accepted, ()) = futures_util::future::join(verdict, commit).await;
        assert!(!accepted, "round {round}");
        assert!(!is_member(&watcher, me).await, "round {round}");
    }
}

#[tokio::test]
async fn the_legacy_beat_refreshes_only_what_is_older_than_ten_seconds() {
    let db = common::database().await;
    let client = db.connect().await;
    for (id, age) in [(1, 5), (2, 11)] {
        member(&client, instance(id), age).await;
    }
    run(&client, "create table before as select * from wh_service_instances").await;
    for id in [1, 2, 3] {
        assert!(
            value::<bool>(
                &client,
                &format!("select register_instance_heartbeat('{}', 's', 'h', 1)", instance(id))
            )
            .await
        );
    }
    let untouched = "select n.last_heartbeat_at is not distinct from b.last_heartbeat_at \
                     from wh_service_instances n left join before b using (instance_id) order by instance_id";
    assert_eq!(column::<bool>(&client, untouched).await, [true, false, false]);
}

#[tokio::test]
async fn the_orphan_bell_rings_each_living_instance_once_and_no_dead_one() {
    let db = common::database().await;
    let client = db.connect().await;
    let mut listener = Listener::for_instances(db.direct_url(), &[1, 2, 3, 4].map(instance)).await;
    beat(&client, instance(1)).await;
    beat(&client, instance(2)).await;
    assert_eq!(listener.rung().await, []);
    member(&client, instance(3), 40).await;
    member(&client, instance(4), 50).await;
    beat(&client, instance(1)).await;
    assert_eq!(listener.rung().await, rings(&[(1, "orphan"), (2, "orphan")]));
    beat(&client, instance(1)).await;
    assert_eq!(listener.rung().await, []);
}

#[tokio::test]
async fn two_beats_that_sweep_each_other_never_deadlock() {
    let db = common::database().await;
    // Each has a setting of its own and tells its own statistics.
    let (one, two) = (db.connect_direct().await, db.connect_direct().await);
    // Without its own limit of 100 ms the sweep would show every wait, and a deadlock is seen after 10 ms.
    run(&one, "alter function wh_sweep(uuid) set lock_timeout = 0").await;
    for client in [&one, &two] {
        run(client, "set deadlock_timeout = '10ms'").await;
    }
    for round in 0..200_u128 {
        let (a, b) = (instance(2 * round), instance(2 * round + 1));
        member(&one, a, 40).await;
        member(&one, b, 40).await;
        let (a_lives, b_lives) = futures_util::future::join(beat(&one, a), beat(&two, b)).await;
        assert!(a_lives || b_lives, "round {round}: somebody survives");
        assert_eq!(
            (a_lives, b_lives),
            (is_member(&one, a).await, is_member(&one, b).await),
            "round {round}: the answer is the truth"
        );
    }
    run(&one, "select pg_stat_force_next_flush()").await;
    run(&two, "select pg_stat_force_next_flush()").await;
    assert_eq!(
        value::<i64>(&one, "select deadlocks from pg_stat_database where datname = current_database()").await,
        0
    );
}

#[tokio::test]
async fn a_beat_waits_neither_for_its_own_claim_nor_for_a_stale_peers() {
    let db = common::database().await;
    let (mine, peers, beating) = (db.connect().await, db.connect().await, db.connect().await);
    let (me, peer) = (instance(1), instance(2));
    beat(&mine, me).await;
    beat(&mine, peer).await;
    run(&mine, "select store_outbox_messages('[{\"message_type\": \"a\", \"payload\": 1}, {\"message_type\": \"b\", \"payload\": 2}]')").await;
    run(&mine, &format!("begin; select claim_work('{me}', 1)")).await;
    run(&peers, &format!("begin; select claim_work('{peer}', 1)")).await;
    run(&beating, "alter function wh_sweep(uuid) set lock_timeout = 0; set statement_timeout = '60s'").await;
    run(&beating, "set lock_timeout = '5s'").await;
    assert!(beat(&beating, me).await, "its own claim is open");
    run(&peers, "commit").await;
    run(&beating, &format!("update wh_service_instances set last_heartbeat_at = clock_timestamp() - interval '40 s' where instance_id = '{peer}'")).await;
    run(
        &peers,
        &format!("begin; select 1 from wh_service_instances where instance_id = '{peer}' for key share"),
    )
    .await;
    assert!(beat(&beating, me).await, "a stale peer's claim is open");
    assert!(is_member(&beating, peer).await, "left for the next beat");
    run(&peers, "commit").await;
    assert!(beat(&beating, me).await);
    assert!(!is_member(&beating, peer).await);
    assert_eq!(
        value::<i64>(&beating, &format!("select count(*) from wh_outbox where instance_id = '{peer}'")).await,
        0
    );
}

#[tokio::test]
async fn a_beat_stands_although_its_sweep_fails() {
    let db = common::database().await;
    let client = db.connect().await;
    member(&client, instance(2), 40).await;
    run(&client, "create or replace function wh_release_evicted(p_max_rows int default 1000) returns int language plpgsql as $$ begin raise division_by_zero; end $$").await;
    assert!(beat(&client, instance(1)).await);
    assert!(is_member(&client, instance(1)).await);
    assert!(is_member(&client, instance(2)).await, "the failed sweep left nothing behind");
}

#[tokio::test]
async fn every_function_has_one_signature_and_a_fixed_search_path() {
    let db = common::database().await;
    let client = db.connect().await;
    let overloaded = "select proname::text from pg_proc where pronamespace = 'public'::regnamespace group by proname having count(*) > 1";
    assert_eq!(column::<String>(&client, overloaded).await, Vec::<String>::new());
    let open = "select proname::text from pg_proc where pronamespace = 'public'::regnamespace and prosqlbody is null \
                and not coalesce(array_to_string(proconfig, ',') like '%search_path=pg_catalog, public, pg_temp%', false) and prokind = 'f' and prolang = (select oid from pg_language where lanname = 'plpgsql')";
    assert_eq!(column::<String>(&client, open).await, Vec::<String>::new());
    // A scan that is ruled out by its cost makes the whole plan dear enough for jit, which then compiles it at every call: 200 ms.
    let compiled = "select proname::text from pg_proc where pronamespace = 'public'::regnamespace \
                    and array_to_string(proconfig, ',') like '%enable\\_%=off%' and not 'jit=off' = any (proconfig)";
    assert_eq!(column::<String>(&client, compiled).await, Vec::<String>::new());
    assert!(
        !value::<bool>(&client, "select exists (select 1 from pg_proc where proname = 'process_work_batch')")
            .await
    );
}
