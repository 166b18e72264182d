//! The stand-ins for the database side of liveness do as the database does, so that tests of actors on them mean something.

use std::time::Duration;

use workpump_actors::instance::InstanceId;
use workpump_actors::port::Renewal::{Locked, Lost, Renewed};
use workpump_actors::port::{
    DeathWatch, DirectConnector, Notification, RenewalStore, StoreError, SuspectVerdict, SweepStore,
    WorkStore,
};
use workpump_actors::testing::{
    DirectOp, FakeDeathWatch, FakeDirect, FakeStore, FakeSweep, Reply, Row, in_virtual_time, quiesce,
};
use workpump_actors::work::{Category, ClaimEpoch, WorkKey};

const LEASE: Duration = Duration::from_mins(5);

#[test]
fn a_session_that_ends_takes_its_lock_its_channels_and_its_notifications_along() {
    in_virtual_time(async {
        let direct = FakeDirect::new();
        let me = InstanceId::fresh();
        let (session, mut heard) = direct.connect().await.unwrap();
        let channel = session.work_channel(me).await.unwrap();
        session.listen(vec![channel.clone()]).await.unwrap();
        assert!(session.claim_alive_lock(me).await.unwrap());
        assert!(direct.ring(&channel, "outbox"));
        session.notify(channel.clone(), "mine".to_owned()).await.unwrap();
        let rung =
            |payload: &str, own| Notification { channel: channel.clone(), payload: payload.to_owned(), own };
        assert_eq!(heard.recv().await, Some(rung("outbox", false)));
        assert_eq!(heard.recv().await, Some(rung("mine", true)));
        session.listen(vec!["other".to_owned()]).await.unwrap();
        session.unlisten(vec!["other".to_owned(), "never".to_owned()]).await.unwrap();
        assert!(!direct.ring("other", "x") && direct.channels() == [channel.clone()]);
        direct.end_session();
        assert_eq!(heard.recv().await, None);
        assert!(!direct.holds_lock(me) && !direct.ring(&channel, "outbox"));
        assert!(matches!(session.ping().await, Err(StoreError::Unavailable(_))));
        direct.take_lock(me);
        let (second, _heard) = direct.connect().await.unwrap();
        drop(session);
        assert!(direct.is_connected(), "an old session ends only itself");
        assert!(!second.claim_alive_lock(me).await.unwrap());
        direct.free_lock(me);
        assert!(second.claim_alive_lock(me).await.unwrap());
        drop(second);
        assert!(!direct.is_connected());
        direct.script(DirectOp::Connect, Reply::Fail(StoreError::NotDirect("test".to_owned())));
        assert!(matches!(direct.connect().await, Err(StoreError::NotDirect(_))));
        assert_eq!((direct.sessions(), direct.count(DirectOp::Connect)), (2, 3));
    });
}

#[test]
fn a_watch_ends_with_a_death_and_a_verdict_needs_the_grace() {
    in_virtual_time(async {
        let watch = FakeDeathWatch::new();
        let (me, peer, other) = (InstanceId::fresh(), InstanceId::fresh(), InstanceId::fresh());
        let wait = Duration::from_secs(20);
        watch.suspect(other);
        assert_eq!(watch.watch(me, wait, false).await.unwrap(), None);
        let waiting = watch.watch(me, wait, false);
        let dying = async {
            tokio::time::sleep(Duration::from_secs(7)).await;
            watch.die(peer);
        };
        let (seen, ()) = tokio::join!(waiting, dying);
        let suspect = seen.unwrap().expect("a death");
        assert_eq!((suspect.peer, watch.now()), (peer, suspect.since));
        let grace = Duration::from_secs(5);
        assert_eq!(watch.evict_suspect(me, suspect, grace).await.unwrap(), SuspectVerdict::Early);
        tokio::time::sleep(grace).await;
        watch.judge_next(Ok(SuspectVerdict::Beaten));
        assert_eq!(watch.evict_suspect(me, suspect, grace).await.unwrap(), SuspectVerdict::Beaten);
        assert_eq!(watch.evict_suspect(me, suspect, grace).await.unwrap(), SuspectVerdict::Evicted);
        assert_eq!(watch.watch(me, wait, true).await.unwrap().map(|suspect| suspect.peer), Some(other));
    });
}

#[test]
fn a_sweep_finds_the_stale_but_never_itself_and_releases_in_passes() {
    in_virtual_time(async {
        let sweep = FakeSweep::new();
        let (me, peer) = (InstanceId::fresh(), InstanceId::fresh());
        sweep.go_stale(me, 0);
        sweep.go_stale(peer, 2_500);
        sweep.set_busy(true);
        assert_eq!(sweep.sweep(me).await.unwrap(), None);
        sweep.set_busy(false);
        let swept = sweep.sweep(me).await.unwrap().unwrap();
        assert_eq!((swept.evicted, swept.released, swept.unfinished), (vec![peer], 1_000, true));
        sweep.set_locked(true);
        assert_eq!(sweep.release_pass(1_000).await.unwrap(), (0, true));
        sweep.set_locked(false);
        assert_eq!(sweep.release_pass(9_999).await.unwrap(), (1_000, true));
        assert_eq!(sweep.release_pass(1_000).await.unwrap(), (500, false));
    });
}

#[test]
fn a_renewal_answers_for_every_row_and_keeps_runs_together() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let me = InstanceId::fresh();
        let run = store.insert_many(3, &Row::of_stream(uuid::Uuid::now_v7()));
        let single = store.insert(Row::default());
        let claimed = store.claim(request(me)).await.unwrap();
        assert_eq!(claimed.works.len(), 4);
        let item = |key: WorkKey| (key, ClaimEpoch(1));
        tokio::time::sleep(Duration::from_mins(2)).await;
        store.set_locked(run[1], true);
        let items = vec![item(run[2]), item(single), (single, ClaimEpoch(9)), item(run[0]), item(run[1])];
        let answer = store.renew(me, items.clone(), LEASE).await.unwrap();
        assert_eq!(answer, [Locked, Renewed, Lost, Renewed, Locked]);
        assert_eq!(store.lease_left(single), Some(LEASE));
        assert_eq!(store.lease_left(run[2]), Some(Duration::from_mins(3)));
        store.set_locked(run[1], false);
        assert_eq!(store.renew(me, vec![item(run[2])], LEASE).await.unwrap(), [Locked], "without its run");
        let answer = store.renew(me, items.clone(), LEASE).await.unwrap();
        assert_eq!(answer, [Renewed, Renewed, Lost, Renewed, Renewed]);
        assert_eq!(store.renew(InstanceId::fresh(), items.clone(), LEASE).await.unwrap(), [Lost; 5]);
        tokio::time::sleep(LEASE + Duration::from_secs(1)).await;
        assert_eq!(store.renew(me, items.clone(), LEASE).await.unwrap(), [Lost; 5], "not revived");
        store.evict(me);
        assert!(matches!(store.renew(me, items, LEASE).await, Err(StoreError::Evicted(_))));
        quiesce().await;
    });
}

fn request(instance: InstanceId) -> workpump_actors::port::ClaimRequest {
    workpump_actors::port::ClaimRequest {
        instance,
        max_rows: 100,
        max_bytes: 1 << 20,
        lease: LEASE,
        partition_count: 10_000,
        stream_run: 100,
        categories: Category::ALL.into(),
    }
}
