//! Faults planted into the installed functions: the checker must find each of them.
//!
//! Not here, because another layer makes them harmless: dropping a probe in the walk alone (the runs are read again), checking the
//! rows again under their lock (only a claim leases, and it holds the bucket), and `is not done` in a settlement (a done row has no
//! owner).

use tokio_postgres::Client;

#[derive(Debug)]
pub(crate) struct Mutation {
    pub(crate) name: &'static str,
    /// Shown by overlapping producers; else by producers that are serialised per stream.
    pub(crate) overlapping: bool,
    pub(crate) claimers: u64,
    /// Widens the gap between the snapshot of a walk and its locks; no fault by itself.
    slowly: bool,
    /// Which functions, as a regular expression.
    functions: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn planted(
    name: &'static str,
    functions: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutation {
    Mutation { name, overlapping: false, claimers: 4, slowly: false, functions, from, to }
}

const CLAIM: &str = "^wh_claim_";
const READ: &str = "^wh_lock_runs_";
const WALK_AND_READ: &str = "^wh_(walk|lock_runs)_";
const PROMOTE: &str = "^wh_promote_";
const SETTLE: &str = "^wh_settle_";
const RENEW: &str = "^wh_renew_";

pub(crate) static ALL: &[Mutation] = &[
    Mutation {
        overlapping: true,
        ..planted("no bucket lock", "^wh_walk_", "pg_try_advisory_xact_lock(", "hist.yes(")
    },
    planted("no epoch", CLAIM, "claim_epoch = t.claim_epoch + 1", "claim_epoch = t.claim_epoch"),
    planted("no attempt", CLAIM, "attempts = t.attempts + 1", "attempts = t.attempts"),
    planted("a claim waits for rows", READ, "for update skip locked", "for update"),
    planted("a promotion waits for rows", PROMOTE, "for update skip locked", "for update"),
    planted(
        "leased rows do not block",
        WALK_AND_READ,
        "l.instance_id is not null offset 0",
        "false offset 0",
    ),
    planted(
        "a parked head does not block",
        WALK_AND_READ,
        "k.claimable_at is not null and k.seq <",
        "false and k.seq <",
    ),
    planted("a run goes on behind a locked row", READ, "from prefix where whole", "from prefix"),
    planted(
        "a run goes on behind a parked row",
        READ,
        "f.seq < coalesce(head.parked, 9223372036854775807)",
        "true",
    ),
    Mutation {
        slowly: true,
        ..planted("the run is not read again", READ, "l.instance_id is not null offset 0", "false offset 0")
    },
    // One instance alone meets its own old claims again and again.
    Mutation {
        claimers: 1,
        ..planted("a settlement without epoch", SETTLE, "and t.claim_epoch = i.epoch", "")
    },
    planted("a settlement without instance", SETTLE, "and t.instance_id = p_instance_id", ""),
    planted("a retry keeps the run", SETTLE, "and l.seq > failed.seq", "and false"),
    planted("nothing is refunded", SETTLE, "attempts = greatest(t.attempts - 1, 0)", "attempts = t.attempts"),
    planted(
        "epochs start again",
        SETTLE,
        "set instance_id = null, lease_expiry = null, attempts",
        "set claim_epoch = 0, instance_id = null, lease_expiry = null, attempts",
    ),
    Mutation { claimers: 1, ..planted("a renewal without epoch", RENEW, "and t.claim_epoch = i.epoch", "") },
    planted("a renewal revives", RENEW, "t.lease_expiry > v_now", "true"),
    planted("live leases run out", PROMOTE, "and d.claimable_at <= p_now", ""),
    planted("parked rows are due at once", PROMOTE, "and claimable_at <= p_now", ""),
    planted(
        "staggered ends",
        CLAIM,
        "lease_expiry = v_expiry,",
        "lease_expiry = v_expiry - t.seq % 7 * interval '1 millisecond',",
    ),
    planted(
        "leases from the start of the transaction",
        CLAIM,
        "v_now    timestamptz := clock_timestamp()",
        "v_now    timestamptz := now()",
    ),
];

/// Plants a fault. One that changes nothing is a mistake of this list.
pub(crate) async fn plant(client: &Client, mutation: &Mutation) {
    replace(client, mutation.functions, mutation.from, mutation.to).await;
    if mutation.slowly {
        walk_slowly(client).await;
    }
}

/// No fault, but other claims commit between the snapshot of a walk and its locks.
pub(crate) async fn walk_slowly(client: &Client) {
    let lock = "where pg_try_advisory_xact_lock(";
    replace(client, "^wh_walk_", lock, "where hist.slowly() and pg_try_advisory_xact_lock(").await;
}

async fn replace(client: &Client, functions: &str, from: &str, to: &str) {
    let sql = "select pg_get_functiondef(oid) from pg_proc where proname ~ $1 and pronamespace = 'public'::regnamespace";
    let mut changed = 0;
    for row in client.query(sql, &[&functions]).await.expect("the functions") {
        let text: String = row.get(0);
        let mutated = text.replace(from, to);
        if mutated != text {
            client.batch_execute(&mutated).await.unwrap_or_else(|e| panic!("{to}: {e:?}"));
            changed += 1;
        }
    }
    assert!(changed > 0 && changed % 4 == 0, "{from:?} fits {changed} functions");
}
