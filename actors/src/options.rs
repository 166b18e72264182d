//! Every knob of the engine, with its unit in its name, its default, and what zero and none mean. One [`Options::validate`] refuses
//! what cannot work, naming the option, the value and the bound.
//!
//! Names and defaults of the groups `claim`, `heartbeat`, `lease_renewal` are the original system's.

mod gate;
mod liveness;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use gate::{GateMode, GateOptions};
pub use liveness::{LivenessOptions, OnEvicted, OnFence};

/// All options, by group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Options {
    /// Claiming and its cadence.
    pub claim: ClaimOptions,
    /// Heartbeats.
    pub heartbeat: HeartbeatOptions,
    /// The alive-lock, the watch for dead peers, and what this instance does when it may be taken for dead itself.
    pub liveness: LivenessOptions,
    /// How this instance learns that work has arrived.
    pub gate: GateOptions,
    /// Lease length limits and renewal batching.
    pub lease_renewal: LeaseRenewalOptions,
    /// Batching of settlements.
    pub settle: SettleOptions,
    /// Running handlers.
    pub dispatch: DispatchOptions,
}

/// How often and how much to claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClaimOptions {
    /// Milliseconds between polls while NOTIFY is not proven, and the first step of the backoff. Default 250. At least 1. Lower finds
    /// work sooner and costs a statement each time.
    pub polling_interval_milliseconds: u64,
    /// Cap of the backoff in milliseconds. Default 10 000. At or below the base (0 included) switches the backoff off.
    pub polling_max_interval_milliseconds: u64,
    /// Base in milliseconds while NOTIFY is proven; used only when greater than the tight base. Default 5 000. None: always tight.
    pub notify_healthy_polling_interval_milliseconds: Option<u64>,
    /// Poll now and then even while NOTIFY is proven. Default true. False: sleep until a signal or the next known due time.
    pub enable_safety_net_poll: bool,
    /// Rows per claim at most. Default 1 000. At least 1. More rows a trip is faster and holds more work in one process.
    pub max_streams_per_batch: u32,
    /// Megabytes of payload per claim at most; the first row always comes. Default 16. At least 1.
    pub max_batch_megabytes: u32,
    /// Lease length in seconds. Default 300. Must exceed the grace. Longer survives longer hiccups and delays the takeover of work
    /// whose owner cannot be proven dead.
    pub lease_seconds: u32,
    /// Modulus of `compute_partition`. Default 10 000. At least 1; all instances of a schema should agree.
    pub partition_count: u32,
    /// Kill-switch. Default true. False: no claim is ever sent.
    pub enabled: bool,
}

impl Default for ClaimOptions {
    fn default() -> Self {
        Self {
            polling_interval_milliseconds: 250,
            polling_max_interval_milliseconds: 10_000,
            notify_healthy_polling_interval_milliseconds: Some(5_000),
            enable_safety_net_poll: true,
            max_streams_per_batch: 1_000,
            max_batch_megabytes: 16,
            lease_seconds: 300,
            partition_count: 10_000,
            enabled: true,
        }
    }
}

impl ClaimOptions {
    /// The lease length.
    pub fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }
}

/// Which signals decide the cadence of the heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LivenessSourceMode {
    /// Beat slowly while the alive-lock is held, fast otherwise.
    #[default]
    AdvisoryLockWhenAvailable,
    /// Always beat fast; the lock decides nothing.
    HeartbeatTableOnly,
}

/// When to beat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeartbeatOptions {
    /// Seconds between beats while the alive-lock is not held. Default 30. At least 1.
    pub interval_seconds: u32,
    /// Seconds between beats while it is held. Default 60. Twice this plus five seconds must stay below five minutes.
    pub slow_interval_seconds: u32,
    /// Whether the alive-lock may slow the beat. Default `AdvisoryLockWhenAvailable`.
    pub liveness_source_mode: LivenessSourceMode,
    /// Kill-switch. Default true. False: the instance sends no beat, takes no alive-lock, never registers and so never claims, is not
    /// ready, and says why when it is asked. It can be switched at run time, by `WorkPump::set_heartbeat`; this is where it begins.
    pub enabled: bool,
}

impl Default for HeartbeatOptions {
    fn default() -> Self {
        Self {
            interval_seconds: 30,
            slow_interval_seconds: 60,
            liveness_source_mode: LivenessSourceMode::default(),
            enabled: true,
        }
    }
}

/// How leases are renewed and where that ends. A lease is renewed at 0.8 of its length while its handler runs, and with it the leases of
/// the rows that wait behind it in its stream; a handler that runs longer than all its renewals is told to stop. At the defaults that is
/// after 28.5 minutes: six times 240 s, and 270 s.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LeaseRenewalOptions {
    /// Renewals per statement at most. Default 200. At least 1. The rows of one stream's run are never divided: a longer run goes by itself,
    /// up to 1 000 rows.
    pub max_batch_size: usize,
    /// Milliseconds to wait for more renewals after the first. Default 200. 0: no waiting. Keep it well below a tenth of the lease.
    pub coalesce_window_milliseconds: u64,
    /// Renewals that end the wait at once. Default 100. 0: as 1.
    pub immediate_flush_threshold: usize,
    /// Requests for renewal that may wait. Default 5 000. At least the batch size; whoever asks for more waits for room.
    pub channel_capacity: usize,
    /// Seconds before the end of a lease at which its handler is told to stop. Default 30. Must be below the lease.
    pub lease_grace_seconds: u32,
    /// Renewals per claimed row at most. Default 6. 0: never renew. A handler that is not done by then is told to stop at its deadline, the
    /// lease ends, and the row is issued again with one more attempt. Higher lets handlers run longer, and a hung one hold up its stream.
    pub max_renewals_per_work: u32,
}

impl Default for LeaseRenewalOptions {
    fn default() -> Self {
        Self {
            max_batch_size: 200,
            coalesce_window_milliseconds: 200,
            immediate_flush_threshold: 100,
            channel_capacity: 5_000,
            lease_grace_seconds: 30,
            max_renewals_per_work: 6,
        }
    }
}

/// How settlements are batched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SettleOptions {
    /// Settlements per statement at most. Default 500. At least 1.
    pub max_batch_size: usize,
    /// Milliseconds to wait for more settlements after the first. Default 10. 0: no waiting.
    pub coalesce_window_milliseconds: u64,
    /// Settlements that end the wait at once. Default 250. 0: as 1.
    pub immediate_flush_threshold: usize,
    /// Settlements that may wait. Default 10 000. At least the batch size.
    pub channel_capacity: usize,
    /// Keep completed rows, stamped with `processed_at`, until maintenance purges them. Default false: completing deletes the row.
    pub keep_completed: bool,
}

impl Default for SettleOptions {
    fn default() -> Self {
        Self {
            max_batch_size: 500,
            coalesce_window_milliseconds: 10,
            immediate_flush_threshold: 250,
            channel_capacity: 10_000,
            keep_completed: false,
        }
    }
}

/// What happens to a stream when one of its rows fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnFailure {
    /// The stream waits until the row succeeds or is dead-lettered.
    #[default]
    Block,
    /// The row is dead-lettered at its first failure and the stream goes on.
    Skip,
}

/// The failure policy of each category.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OnFailureOptions {
    /// Messages to publish. Default `Block`.
    pub outbox: OnFailure,
    /// Messages to handle. Default `Block`.
    pub inbox: OnFailure,
    /// Projection events. Default `Block`.
    pub perspective_event: OnFailure,
    /// Event handlers. Default `Block`.
    pub receptor: OnFailure,
}

/// How rows are run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DispatchOptions {
    /// Rows this instance leases at once, so also the most handlers that can run at once. Default 2 000: two claims of the default size, so
    /// that one is on its way while the other is worked on. At least 1.
    pub max_in_flight: u32,
    /// Threads of the handler runtime. Default none: twice the cores, at least 4.
    pub handler_threads: Option<usize>,
    /// Rows of one stream taken by one claim at most. Default 100. At least 1. Longer runs are cheaper and let a hot stream hold
    /// others up for longer.
    pub stream_run: u32,
    /// Attempts before a row is dead-lettered. Default 10. At least 1.
    pub max_attempts: u32,
    /// First pause after a failure, in seconds; doubles with every attempt. Default 30. At least 1.
    pub retry_base_seconds: u32,
    /// Longest pause between attempts, in seconds. Default 300. At least the base.
    pub retry_max_seconds: u32,
    /// Random spread of the pause in percent either way. Default 10. 0: none; at most 50.
    pub retry_jitter_percent: u32,
    /// Seconds a drain waits for running handlers before it abandons them. Default 30. 0: not at all.
    pub drain_deadline_seconds: u32,
    /// What a failed row means for its stream, per category.
    pub on_failure: OnFailureOptions,
}

impl Default for DispatchOptions {
    fn default() -> Self {
        Self {
            max_in_flight: 2_000,
            handler_threads: None,
            stream_run: 100,
            max_attempts: 10,
            retry_base_seconds: 30,
            retry_max_seconds: 300,
            retry_jitter_percent: 10,
            drain_deadline_seconds: 30,
            on_failure: OnFailureOptions::default(),
        }
    }
}

/// An option that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("option {option} = {value} cannot work: {reason}")]
pub struct OptionsError {
    /// The option, with its group.
    pub option: &'static str,
    /// The value it had.
    pub value: String,
    /// The bound it breaks, and so what to change.
    pub reason: &'static str,
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "numbers are handed in by the dozen, and read better without a reference"
)]
fn check(
    holds: bool,
    option: &'static str,
    value: impl ToString,
    reason: &'static str,
) -> Result<(), OptionsError> {
    if holds { Ok(()) } else { Err(OptionsError { option, value: value.to_string(), reason }) }
}

impl Options {
    /// Refuses what cannot work. Called once, before anything starts.
    pub fn validate(&self) -> Result<(), OptionsError> {
        self.validate_claim()?;
        self.validate_beats_and_renewal()?;
        self.liveness.validate()?;
        self.gate.validate()?;
        self.validate_settle()?;
        self.validate_dispatch()
    }

    fn validate_claim(&self) -> Result<(), OptionsError> {
        let claim = &self.claim;
        check(
            claim.polling_interval_milliseconds >= 1,
            "claim.polling_interval_milliseconds",
            0,
            "must be at least 1",
        )?;
        check(
            claim.notify_healthy_polling_interval_milliseconds != Some(0),
            "claim.notify_healthy_polling_interval_milliseconds",
            0,
            "must be at least 1, or absent for the tight interval",
        )?;
        check(
            (1..=100_000).contains(&claim.max_streams_per_batch),
            "claim.max_streams_per_batch",
            claim.max_streams_per_batch,
            "must be 1 to 100000",
        )?;
        check(
            (1..=1_024).contains(&claim.max_batch_megabytes),
            "claim.max_batch_megabytes",
            claim.max_batch_megabytes,
            "must be 1 to 1024",
        )?;
        check(
            (1..=86_400).contains(&claim.lease_seconds),
            "claim.lease_seconds",
            claim.lease_seconds,
            "must be 1 to 86400",
        )?;
        check(
            (1..=i32::MAX as u32).contains(&claim.partition_count),
            "claim.partition_count",
            claim.partition_count,
            "must be 1 to 2147483647",
        )?;
        check(
            self.lease_renewal.lease_grace_seconds < claim.lease_seconds,
            "lease_renewal.lease_grace_seconds",
            self.lease_renewal.lease_grace_seconds,
            "must be shorter than claim.lease_seconds, or every handler is cancelled at once",
        )
    }

    fn validate_beats_and_renewal(&self) -> Result<(), OptionsError> {
        let beat = &self.heartbeat;
        check(beat.interval_seconds >= 1, "heartbeat.interval_seconds", 0, "must be at least 1")?;
        check(beat.slow_interval_seconds >= 1, "heartbeat.slow_interval_seconds", 0, "must be at least 1")?;
        for (option, seconds) in [
            ("heartbeat.interval_seconds", beat.interval_seconds),
            ("heartbeat.slow_interval_seconds", beat.slow_interval_seconds),
        ] {
            check(
                u64::from(seconds) * 2 + 5 < 300,
                option,
                seconds,
                "twice this plus 5 s must stay below the 5 minutes after which peers evict whatever holds the lock",
            )?;
        }
        let renewal = &self.lease_renewal;
        check(renewal.max_batch_size >= 1, "lease_renewal.max_batch_size", 0, "must be at least 1")?;
        check(
            renewal.channel_capacity >= renewal.max_batch_size,
            "lease_renewal.channel_capacity",
            renewal.channel_capacity,
            "must be at least lease_renewal.max_batch_size",
        )
    }

    fn validate_settle(&self) -> Result<(), OptionsError> {
        let settle = &self.settle;
        check(settle.max_batch_size >= 1, "settle.max_batch_size", 0, "must be at least 1")?;
        check(
            settle.channel_capacity >= settle.max_batch_size,
            "settle.channel_capacity",
            settle.channel_capacity,
            "must be at least settle.max_batch_size",
        )
    }

    fn validate_dispatch(&self) -> Result<(), OptionsError> {
        let dispatch = &self.dispatch;
        check(
            (1..=1_000_000).contains(&dispatch.max_in_flight),
            "dispatch.max_in_flight",
            dispatch.max_in_flight,
            "must be 1 to 1000000",
        )?;
        check(
            dispatch.handler_threads != Some(0),
            "dispatch.handler_threads",
            0,
            "must be at least 1, or absent for the default",
        )?;
        check(
            (1..=10_000).contains(&dispatch.stream_run),
            "dispatch.stream_run",
            dispatch.stream_run,
            "must be 1 to 10000",
        )?;
        check(dispatch.max_attempts >= 1, "dispatch.max_attempts", 0, "must be at least 1")?;
        check(
            dispatch.retry_base_seconds >= 1,
            "dispatch.retry_base_seconds",
            0,
            "must be at least 1, or all attempts burn in one moment",
        )?;
        check(
            dispatch.retry_max_seconds >= dispatch.retry_base_seconds,
            "dispatch.retry_max_seconds",
            dispatch.retry_max_seconds,
            "must be at least dispatch.retry_base_seconds",
        )?;
        check(
            dispatch.retry_jitter_percent <= 50,
            "dispatch.retry_jitter_percent",
            dispatch.retry_jitter_percent,
            "must be at most 50",
        )
    }
}
