//! What a failed attempt means for its row.
//!
//! The rule: a failure is retried after a growing, jittered pause until the attempts are used up, then kept as a dead letter; a row that
//! took its process down too often is not run again. The failures this prevents: a poison row that blocks its stream for ever, and a
//! herd of rows that all come back in the same second.

use std::time::Duration;

use crate::options::{DispatchOptions, OnFailure, OnFailureOptions};
use crate::port::Verdict;
use crate::runner::Failure;
use crate::work::{Category, FailureReason};

/// Crashes after which a row is kept as a dead letter without being run again.
pub const CRASH_LIMIT: u32 = 4;

/// Bytes of error text kept at most.
pub const MAX_ERROR_BYTES: usize = 8 * 1024;

/// The longest pause a handler may ask for.
const MAX_PAUSE: Duration = Duration::from_hours(366 * 24);

/// Doublings of the pause at most.
const MAX_DOUBLINGS: u32 = 10;

/// Decides between another attempt and a dead letter.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    base: Duration,
    max: Duration,
    jitter_percent: u32,
    max_attempts: u32,
    on_failure: OnFailureOptions,
}

impl RetryPolicy {
    /// The policy these options describe.
    pub fn new(options: &DispatchOptions) -> Self {
        Self {
            base: Duration::from_secs(options.retry_base_seconds.into()),
            max: Duration::from_secs(options.retry_max_seconds.into()),
            jitter_percent: options.retry_jitter_percent.min(100),
            max_attempts: options.max_attempts,
            on_failure: options.on_failure.clone(),
        }
    }

    /// The pause after attempt number `attempts`. `unit` is a random number from 0 to 1: 0.5 means no jitter.
    pub fn backoff(&self, attempts: u32, unit: f64) -> Duration {
        let doublings = attempts.saturating_sub(1).min(MAX_DOUBLINGS);
        let pause = self.base.saturating_mul(1 << doublings).min(self.max);
        let unit = if unit.is_finite() { unit.clamp(0.0, 1.0) } else { 0.5 };
        let factor = 1.0 + (unit * 2.0 - 1.0) * f64::from(self.jitter_percent) / 100.0;
        pause.mul_f64(factor)
    }

    /// The verdict on a row that must not even be started, or `None` when it may run.
    pub fn before_run(&self, attempts: u32, crash_count: u32) -> Option<Verdict> {
        if crash_count >= CRASH_LIMIT {
            let error = format!("not run: its owner died or its lease ran out {crash_count} times");
            return Some(Verdict::DeadLetter { reason: FailureReason::CrashLoop, error });
        }
        if attempts > self.max_attempts {
            let error = format!("not run: {} attempts were used up without an answer", attempts - 1);
            return Some(Verdict::DeadLetter { reason: FailureReason::MaxAttempts, error });
        }
        None
    }

    /// The verdict on a row whose attempt number `attempts` failed.
    pub fn judge(&self, category: Category, attempts: u32, failure: Failure, unit: f64) -> Verdict {
        match failure {
            Failure::Permanent { reason, error } => {
                Verdict::DeadLetter { reason, error: clean_error(&error) }
            }
            Failure::Retry { reason, error, .. } if self.on_failure(category) == OnFailure::Skip => {
                Verdict::DeadLetter { reason, error: clean_error(&error) }
            }
            Failure::Retry { error, .. } if attempts >= self.max_attempts => {
                Verdict::DeadLetter { reason: FailureReason::MaxAttempts, error: clean_error(&error) }
            }
            Failure::Retry { after, reason, error } => Verdict::Retry {
                after: after.map_or_else(|| self.backoff(attempts, unit), |after| after.min(MAX_PAUSE)),
                reason,
                error: clean_error(&error),
            },
        }
    }

    fn on_failure(&self, category: Category) -> OnFailure {
        match category {
            Category::Outbox => self.on_failure.outbox,
            Category::Inbox => self.on_failure.inbox,
            Category::PerspectiveEvent => self.on_failure.perspective_event,
            Category::Receptor => self.on_failure.receptor,
        }
    }
}

/// The text without NUL characters, which a database cannot store, and cut to a bounded length between two characters.
pub fn clean_error(text: &str) -> String {
    let mut clean = String::with_capacity(text.len().min(MAX_ERROR_BYTES));
    for character in text.chars().filter(|character| *character != '\0') {
        if clean.len() + character.len_utf8() > MAX_ERROR_BYTES {
            break;
        }
        clean.push(character);
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> RetryPolicy {
        RetryPolicy::new(&DispatchOptions::default())
    }

    const EDGES: [u32; 12] = [0, 1, 2, 3, 9, 10, 11, 12, 64, i32::MAX as u32, u32::MAX - 1, u32::MAX];

    #[test]
    fn the_pause_doubles_from_thirty_seconds_to_five_minutes() {
        let table = [(0, 30), (1, 30), (2, 60), (3, 120), (4, 240), (5, 300), (11, 300), (u32::MAX, 300)];
        for (attempts, seconds) in table {
            assert_eq!(policy().backoff(attempts, 0.5), Duration::from_secs(seconds), "attempt {attempts}");
        }
    }

    #[test]
    fn the_jitter_stays_inside_ten_percent_for_any_attempt_and_any_number() {
        for attempts in EDGES {
            let plain = policy().backoff(attempts, 0.5).as_secs_f64();
            for unit in [-1.0, 0.0, 0.25, 0.5, 1.0, 2.0, f64::NAN, f64::INFINITY] {
                let pause = policy().backoff(attempts, unit).as_secs_f64();
                assert!((plain * 0.899..=plain * 1.101).contains(&pause), "{attempts} {unit} {pause}");
            }
        }
        assert_eq!(policy().backoff(1, 0.0), Duration::from_secs(27));
        assert_eq!(policy().backoff(1, 1.0), Duration::from_secs(33));
    }

    #[test]
    fn the_last_attempt_becomes_a_dead_letter_that_keeps_its_error() {
        for attempts in EDGES {
            let verdict = policy().judge(Category::Inbox, attempts, Failure::retry("no route"), 0.5);
            match verdict {
                Verdict::Retry { error, .. } => {
                    assert!(attempts < 10, "attempt {attempts}");
                    assert_eq!(error, "no route");
                }
                Verdict::DeadLetter { reason, error } => {
                    assert!(attempts >= 10, "attempt {attempts}");
                    assert_eq!((reason, error.as_str()), (FailureReason::MaxAttempts, "no route"));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_pause_asked_for_is_kept_and_counts_as_an_attempt() {
        let failure = || Failure::retry_after(Duration::from_secs(7), "later");
        let expected = Verdict::Retry {
            after: Duration::from_secs(7),
            reason: FailureReason::Unknown,
            error: "later".into(),
        };
        assert_eq!(policy().judge(Category::Outbox, 1, failure(), 0.1), expected);
        assert!(matches!(policy().judge(Category::Outbox, 10, failure(), 0.1), Verdict::DeadLetter { .. }));
        let endless = Failure::retry_after(Duration::MAX, "never");
        assert!(
            matches!(policy().judge(Category::Outbox, 1, endless, 0.1), Verdict::Retry { after, .. } if after == MAX_PAUSE)
        );
    }

    #[test]
    fn skip_gives_a_row_up_at_its_first_failure() {
        let mut options = DispatchOptions::default();
        options.on_failure.receptor = OnFailure::Skip;
        let policy = RetryPolicy::new(&options);
        let verdict = policy.judge(Category::Receptor, 1, Failure::retry("broken"), 0.5);
        assert_eq!(verdict, Verdict::DeadLetter { reason: FailureReason::Unknown, error: "broken".into() });
        assert!(matches!(
            policy.judge(Category::Inbox, 1, Failure::retry("broken"), 0.5),
            Verdict::Retry { .. }
        ));
    }

    #[test]
    fn a_permanent_failure_is_never_tried_again() {
        let verdict = policy().judge(Category::Inbox, 1, Failure::permanent("no such order"), 0.5);
        assert_eq!(
            verdict,
            Verdict::DeadLetter { reason: FailureReason::Validation, error: "no such order".into() }
        );
    }

    #[test]
    fn a_crash_loop_and_used_up_attempts_are_not_run() {
        for crashes in EDGES {
            let verdict = policy().before_run(1, crashes);
            assert_eq!(verdict.is_some(), crashes >= 4, "{crashes}");
            if let Some(verdict) = verdict {
                assert!(matches!(verdict, Verdict::DeadLetter { reason: FailureReason::CrashLoop, .. }));
            }
        }
        for attempts in EDGES {
            assert_eq!(policy().before_run(attempts, 0).is_some(), attempts > 10, "{attempts}");
        }
    }

    #[test]
    fn error_texts_lose_nul_characters_and_are_cut_between_characters() {
        assert_eq!(clean_error("a\0b\0"), "ab");
        let long = "é".repeat(MAX_ERROR_BYTES);
        let cut = clean_error(&long);
        assert_eq!(cut.len(), MAX_ERROR_BYTES);
        let odd = format!("x{long}");
        assert_eq!(clean_error(&odd).len(), MAX_ERROR_BYTES - 1);
        assert_eq!(clean_error(""), "");
    }
}
