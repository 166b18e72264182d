//! The tables of the seeds, literally, and what Rust and SQL must agree on.

mod common;

use std::time::Duration;

use tokio_postgres::types::Type;
use workpump::Options;
use workpump::engine::options::{GateMode, GateOptions, LivenessSourceMode, OnEvicted, OnFence};
use workpump::engine::policy::retry::RetryPolicy;

#[test]
fn every_default_of_the_claim_worker_is_the_seeds() {
    let claim = Options::default().claim;
    assert_eq!(claim.polling_interval_milliseconds, 250);
    assert_eq!(claim.polling_max_interval_milliseconds, 10_000);
    assert_eq!(claim.notify_healthy_polling_interval_milliseconds, Some(5_000));
    assert!(claim.enable_safety_net_poll);
    assert_eq!(claim.max_streams_per_batch, 1_000);
    assert_eq!(claim.lease_seconds, 300);
    assert_eq!(claim.partition_count, 10_000);
    assert!(claim.enabled);
}

#[test]
fn every_default_of_the_heartbeat_and_the_renewal_is_the_seeds() {
    let options = Options::default();
    assert_eq!((options.heartbeat.interval_seconds, options.heartbeat.slow_interval_seconds), (30, 60));
    assert_eq!(options.heartbeat.liveness_source_mode, LivenessSourceMode::AdvisoryLockWhenAvailable);
    assert!(options.heartbeat.enabled);
    let renewal = options.lease_renewal;
    assert_eq!((renewal.max_batch_size, renewal.coalesce_window_milliseconds), (200, 200));
    assert_eq!((renewal.immediate_flush_threshold, renewal.channel_capacity), (100, 5_000));
    assert_eq!((renewal.lease_grace_seconds, renewal.max_renewals_per_work), (30, 6));
}

#[test]
fn every_default_of_settling_and_dispatching_is_the_contracts() {
    let options = Options::default();
    let settle = options.settle;
    assert_eq!((settle.max_batch_size, settle.coalesce_window_milliseconds), (500, 10));
    assert_eq!((settle.immediate_flush_threshold, settle.channel_capacity), (250, 10_000));
    assert!(!settle.keep_completed);
    let dispatch = options.dispatch;
    assert_eq!((dispatch.stream_run, dispatch.max_attempts), (100, 10));
    assert_eq!(
        (dispatch.retry_base_seconds, dispatch.retry_max_seconds, dispatch.retry_jitter_percent),
        (30, 300, 10)
    );
}

#[test]
fn every_default_of_liveness_is_the_contracts_and_its_bounds_hold() {
    let liveness = Options::default().liveness;
    assert!(liveness.death_watch);
    assert_eq!((liveness.lock_loss_grace_seconds, liveness.stale_sweep_interval_seconds), (5, 60));
    assert_eq!((liveness.on_fence, liveness.on_evicted), (OnFence::Hold, OnEvicted::Reincarnate));
    let refusal = |change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        options.validate().err().map(|error| error.option)
    };
    let grace = Some("liveness.lock_loss_grace_seconds");
    assert_eq!(refusal(|options| options.liveness.lock_loss_grace_seconds = 1), None);
    assert_eq!(refusal(|options| options.liveness.lock_loss_grace_seconds = 0), grace);
    assert_eq!(refusal(|options| options.liveness.lock_loss_grace_seconds = 61), grace);
    let sweep = Some("liveness.stale_sweep_interval_seconds");
    assert_eq!(refusal(|options| options.liveness.stale_sweep_interval_seconds = 0), sweep);
}

#[test]
fn every_default_of_the_gate_is_the_contracts_and_its_bounds_hold() {
    let gate = Options::default().gate;
    assert_eq!(gate.mode, GateMode::Auto);
    assert_eq!((gate.probe_interval_seconds, gate.probe_timeout_seconds), (30, 5));
    assert_eq!((gate.self_test_timeout_seconds, gate.reconnect_max_seconds), (2, 4));
    let one = |value: u32, field: fn(&mut GateOptions) -> &mut u32| {
        let mut options = Options::default();
        *field(&mut options.gate) = value;
        options.validate().err().map(|error| error.option)
    };
    let bounds = |option, most, field: fn(&mut GateOptions) -> &mut u32| {
        assert_eq!([0, most + 1].map(|value| one(value, field)), [Some(option); 2]);
        assert_eq!([1, most].map(|value| one(value, field)), [None; 2]);
    };
    bounds("gate.probe_interval_seconds", 3_600, |gate| &mut gate.probe_interval_seconds);
    bounds("gate.probe_timeout_seconds", 60, |gate| &mut gate.probe_timeout_seconds);
    bounds("gate.self_test_timeout_seconds", 60, |gate| &mut gate.self_test_timeout_seconds);
    bounds("gate.reconnect_max_seconds", 300, |gate| &mut gate.reconnect_max_seconds);
}

#[tokio::test]
async fn the_pause_after_an_attempt_is_the_same_in_rust_and_in_sql() {
    let database = common::database().await;
    let client = database.connect().await;
    let edges = [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 31, 32, 33, 63, 64, 1_000, u32::MAX - 1, u32::MAX];
    for (base, max) in [(30, 300), (1, 1), (1, 4_000_000_000_u32), (7, 3_600)] {
        let mut options = Options::default().dispatch;
        (options.retry_base_seconds, options.retry_max_seconds, options.retry_jitter_percent) =
            (base, max, 0);
        let policy = RetryPolicy::new(&options);
        let (sql_base, sql_max) = (base.cast_signed(), i32::try_from(max).unwrap_or(i32::MAX));
        for attempts in edges {
            let text = "select extract(epoch from wh_retry_delay($1, $2, $3))::float8";
            let row = client
                .query_typed_one(
                    text,
                    &[(&i64::from(attempts), Type::INT8), (&sql_base, Type::INT4), (&sql_max, Type::INT4)],
                )
                .await
                .unwrap();
            let sql = Duration::from_secs_f64(row.get(0));
            assert_eq!(policy.backoff(attempts, 0.5), sql, "attempt {attempts}, base {base}, at most {max}");
        }
    }
}
