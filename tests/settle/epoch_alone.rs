//! The epoch is a fence of its own: with every look at owner and tombstone taken out, a zombie still changes nothing.
//!
//! And the counter-proof: with the epoch taken out as well, it does. So the first half is no accident of what else is checked.

use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::work::{Claim, Claimed, KINDS, Kind, Lab, Session, verdict};

const SETTLE: &str = "^wh_settle_";
const RENEW: &str = "^wh_renew_(outbox|inbox|perspective_events|receptor_work)$";

/// Replaces text in the functions whose name matches; a replacement that hits nothing is a mistake of the test.
async fn replace(client: &Client, functions: &str, from: &str, to: &str) {
    let sql = "select pg_get_functiondef(oid) from pg_proc where proname ~ $1 and pronamespace = 'public'::regnamespace";
    let mut changed = 0;
    for row in client.query_typed(sql, &[(&functions, Type::TEXT)]).await.expect("the functions") {
        let text: String = row.get(0);
        let mutated = text.replace(from, to);
        if mutated != text {
            client.batch_execute(&mutated).await.unwrap_or_else(|error| panic!("{to}: {error:?}"));
            changed += 1;
        }
    }
    assert!(changed > 0, "{from:?} stands in no function {functions}");
}

/// Takes out everything by which a zombie is known but the epoch: the owner of the row, the end of the lease, the tombstone.
async fn without_the_state_check(client: &Client) {
    replace(client, SETTLE, "t.instance_id = p_instance_id and t.claim_epoch", "t.claim_epoch").await;
    replace(client, RENEW, "t.instance_id = p_instance_id and t.claim_epoch", "t.claim_epoch").await;
    replace(client, RENEW, "t.lease_expiry > v_now", "true").await;
    for caller in ["^settle_work$", "^renew_claims$"] {
        replace(client, caller, "where e.instance_id = p_instance_id", "where false").await;
    }
}

async fn without_the_epoch(client: &Client) {
    replace(client, SETTLE, "t.claim_epoch = i.epoch and", "").await;
    replace(client, RENEW, "t.claim_epoch = i.epoch", "true").await;
}

/// Takes a row over from an instance that was evicted while it slept. Returns the sleeper, what it believes to hold, and the row's new owner.
async fn taken_over(db: &Session, kind: &Kind, stream: u64) -> (Uuid, Claimed) {
    let (zombie, other) = (db.member().await, db.member().await);
    db.store(kind, crate::work::scattered(stream)).await;
    let claimed = db.claim(&Claim::of(zombie).only(kind)).await;
    db.batch_execute(&format!("select evict_instance('{zombie}', null, 'asleep')")).await.expect("evicted");
    let taken = db.claim(&Claim::of(other).only(kind)).await;
    assert_eq!((taken[0].id, taken[0].epoch), (claimed[0].id, claimed[0].epoch + 1), "{kind:?}");
    (zombie, claimed[0].clone())
}

async fn renew(db: &Session, kind: &Kind, me: Uuid, row: &Claimed) -> usize {
    let sql = "select work_id from renew_claims($1, $2, $3, $4, 3600) where lease_expiry is not null";
    let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
        [&kind.category, &me, &vec![row.id], &vec![row.epoch]];
    db.query(sql, &parameters).await.expect("an answer").len()
}

#[tokio::test]
async fn a_zombie_neither_completes_nor_fails_nor_releases_nor_buries_nor_renews_a_row_by_its_epoch_alone() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        without_the_state_check(&db).await;
        let (zombie, row) = taken_over(&db, kind, 1).await;
        let before = db.state(kind, row.id).await;
        for name in ["complete", "retry", "release", "dead_letter"] {
            let fenced = db.try_settle(zombie, &[verdict(&row, name)], false).await.expect("an answer");
            assert_eq!(fenced.len(), 1, "{name} of {kind:?}");
            assert_eq!(db.state(kind, row.id).await, before, "{name} of {kind:?}");
        }
        assert_eq!(renew(&db, kind, zombie, &row).await, 0, "{kind:?}");
        assert_eq!(db.state(kind, row.id).await, before, "renewal of {kind:?}");
        assert_eq!(db.number("select count(*) from wh_dead_letters").await, 0);
    }
}

#[tokio::test]
async fn without_the_epoch_too_it_would_change_every_row() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        without_the_state_check(&db).await;
        without_the_epoch(&db).await;
        for (stream, name) in (1..).zip(["complete", "retry", "release", "dead_letter", "renew"]) {
            let (zombie, row) = taken_over(&db, kind, stream).await;
            let before = db.state(kind, row.id).await;
            if name == "renew" {
                assert_eq!(renew(&db, kind, zombie, &row).await, 1, "{kind:?}");
            } else {
                db.settle(zombie, &[verdict(&row, name)]).await;
            }
            assert_ne!(db.state(kind, row.id).await, before, "{name} of {kind:?}");
        }
    }
}
