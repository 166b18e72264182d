//! How soon a sleeper has what was stored for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use workpump::Failure;

use crate::common::{self, scale};
use crate::rig::{Asleep, Run, asleep, pump, quantile, signals_only, started, store};
use crate::sql::{column, run, stream};

#[tokio::test]
async fn a_sleeper_starts_a_row_a_moment_after_it_was_stored() {
    let mut it = Asleep::new(signals_only()).await;
    let (mut calls, mut waits) = (Vec::new(), Vec::new());
    for n in 0..100 * u128::from(scale()) {
        sleep(Duration::from_millis(30)).await;
        let before = Instant::now();
        let id = store(&it.client, [None, Some(stream(n % 7))][n as usize % 2], "").await;
        calls.push(before.elapsed());
        let started = it.next().await;
        assert_eq!(started.id, id);
        waits.push(started.at.saturating_duration_since(before));
    }
    let call = (quantile(&mut calls, 0.5), quantile(&mut calls, 0.99));
    let wait = (quantile(&mut waits, 0.5), quantile(&mut waits, 0.99));
    println!(
        "enqueue call p50 {:.2?} p99 {:.2?}; until its handler starts p50 {:.2?} p99 {:.2?}",
        call.0, call.1, wait.0, wait.1
    );
    assert!(wait.0 < Duration::from_millis(100), "slower than any poll: {:?}", wait.0);
    it.pump.drain().await;
}

/// Each row's handler stores the next one, in a transaction of its own.
#[tokio::test]
async fn a_chain_of_ten_hops_takes_no_time_worth_a_poll() {
    let db = common::database().await;
    let client = Arc::new(db.connect().await);
    let (tell, mut telling) = unbounded_channel();
    let run_chain = {
        let client = Arc::<Client>::clone(&client);
        Run::new(move |job| {
            let (tell, client) = (tell.clone(), Arc::clone(&client));
            async move {
                let hop: u32 = serde_json::from_slice(&job.work.payload)?;
                if hop < 10 {
                    let of = stream(u128::from(hop) % 3 + 1);
                    let next = format!(
                        "insert into wh_outbox (stream_id, message_type, payload) values ('{of}', 't', '{}')",
                        hop + 1
                    );
                    client.batch_execute(&next).await?;
                } else {
                    started(&tell, &job);
                }
                Ok::<(), Failure>(())
            }
        })
    };
    let pumps =
        [pump(db.url(), signals_only(), &run_chain).await, pump(db.url(), signals_only(), &run_chain).await];
    let mut took = Vec::new();
    for _ in 0..20 {
        for pump in &pumps {
            asleep(pump).await;
        }
        let begin = Instant::now();
        run(
            &client,
            &format!(
                "insert into wh_outbox (stream_id, message_type, payload) values ('{}', 't', '1')",
                stream(1)
            ),
        )
        .await;
        let last = crate::rig::next(&mut telling).await;
        took.push(last.at.saturating_duration_since(begin));
    }
    println!("ten hops: {took:.0?}");
    // In a quiet moment: a busy machine gets more tries.
    assert!(took.iter().any(|took| *took < Duration::from_millis(200)), "{took:?}");
    for pump in pumps {
        pump.drain().await;
    }
}

#[tokio::test]
async fn a_sleeper_whose_session_is_killed_is_rung_again_at_once() {
    let mut it = Asleep::new(signals_only()).await;
    let holder =
        format!("select pid from wh_held_keys() h where h.key = wh_arm_key('{}')", it.pump.instance_id());
    let mut waits = Vec::new();
    for round in 0..10_u64 {
        asleep(&it.pump).await;
        let holders: Vec<i32> = column(&it.client, &holder).await;
        assert_eq!(holders.len(), 1);
        run(&it.client, &format!("select pg_terminate_backend({})", holders[0])).await;
        // Before it has noticed, or after it sleeps again.
        if round % 2 == 1 {
            crate::sql::until(
                &it.client,
                &format!("select not exists (select 1 from pg_stat_activity where pid = {})", holders[0]),
            )
            .await;
        }
        let id = store(&it.client, None, "").await;
        let stored = Instant::now();
        let started = it.next().await;
        assert_eq!(started.id, id);
        waits.push(started.at.saturating_duration_since(stored));
    }
    println!("after its session was killed: {waits:.1?}");
    it.pump.drain().await;
}
