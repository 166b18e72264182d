//! What a run shows: bars while it goes on, the account at its end.
//!
//! The rule: each figure says what it measures. `enqueue_per_second` counts from the first store to the last; `process_per_second` and
//! `elapsed_ms` from the first store to the last relayed line, so both contain the storing that goes on at the same time.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use serde_json::json;
use uuid::Uuid;

use super::Total;
use super::kill::Killed;
use super::ledger::Tally;
use crate::cli::complain;
use crate::cli::enqueue::Refusal;

/// The account of a run.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) messages: u64,
    pub(super) instances: u32,
    pub(super) tally: Tally,
    pub(super) shares: Vec<(Uuid, u64)>,
    pub(super) refused: u64,
    pub(super) refusals: Vec<Refusal>,
    pub(super) enqueueing: Duration,
    pub(super) processing: Duration,
    /// The instance that was killed on purpose.
    pub(super) killed: Option<Killed>,
    /// Evictions of instances that were not killed on purpose.
    pub(super) false_evictions: u64,
    /// Why the run ended before everything was relayed and settled.
    pub(super) trouble: Option<String>,
}

impl Report {
    pub(super) fn is_clean(&self) -> bool {
        self.tally.is_clean() && self.trouble.is_none()
    }

    fn takeover(&self) -> Option<Duration> {
        self.killed.and_then(|killed| killed.takeover)
    }

    pub(super) fn json(&self) -> String {
        let Tally {
            enqueued,
            processed,
            lost,
            duplicates,
            redelivered,
            order_violations,
            streams,
            foreign: _,
            died,
        } = self.tally;
        json!({
            "messages": self.messages,
            "streams": streams,
            "instances": self.instances,
            "instances_died": died,
            "enqueued": enqueued,
            "processed": processed,
            "lost": lost,
            "duplicates": duplicates,
            "redelivered": redelivered,
            "order_violations": order_violations,
            "false_evictions": self.false_evictions,
            "takeover_ms": self.takeover().map(|takeover| takeover.as_millis() as u64),
            "refused": self.refused,
            "refusals": self.refusals,
            "enqueue_per_second": rate(enqueued, self.enqueueing),
            "process_per_second": rate(processed, self.processing),
            "elapsed_ms": self.processing.as_millis() as u64,
            "error": self.trouble,
        })
        .to_string()
    }

    pub(super) fn text(&self) -> String {
        let Tally {
            enqueued,
            processed,
            lost,
            duplicates,
            redelivered,
            order_violations,
            streams,
            foreign,
            died,
        } = self.tally;
        let mut text =
            format!("{} messages, {streams} streams, {} instances\n", self.messages, self.instances);
        let mut row = |name: &str, count: u64, note: String| {
            let line = format!("  {name:<13}{count:>10}  {note}");
            let _ = writeln!(text, "{}", line.trim_end());
        };
        let speed = |count, time: Duration| {
            format!("{} a second, {:.2} s", rate(count, time).round(), time.as_secs_f64())
        };
        row("enqueued", enqueued, speed(enqueued, self.enqueueing));
        let shares: Vec<String> = self.shares.iter().map(|(_, lines)| lines.to_string()).collect();
        row(
            "processed",
            processed,
            format!("{}; by instance {}", speed(processed, self.processing), shares.join(", ")),
        );
        row(
            "refused",
            self.refused,
            if self.refused > 0 { "lines, see above".to_owned() } else { String::new() },
        );
        row("lost", lost, String::new());
        row("duplicates", duplicates, String::new());
        row("out of order", order_violations, String::new());
        row(
            "redelivered",
            redelivered,
            if redelivered > 0 { "after an instance died".to_owned() } else { String::new() },
        );
        let by_themselves = died.saturating_sub(self.killed.map_or(0, |_| 1));
        if by_themselves > 0 {
            row("died", by_themselves, "instances, before they were told to".to_owned());
        }
        if let Some(killed) = self.killed {
            let after = killed.takeover.map_or_else(
                || "none of its rows was relayed again".to_owned(),
                |takeover| {
                    format!("its first row was relayed again {:.2} s after the kill", takeover.as_secs_f64())
                },
            );
            row("killed", 1, format!("held {} rows; {after}", killed.held));
        }
        if self.false_evictions > 0 || self.killed.is_some() {
            row("evicted", self.false_evictions, "instances, although they were alive".to_owned());
        }
        if foreign > 0 {
            row("foreign", foreign, "lines that are no message of this run".to_owned());
        }
        text.push_str(if self.is_clean() { "nothing lost, doubled or out of order" } else { "NOT CLEAN" });
        text
    }
}

fn rate(count: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { (count as f64 / seconds * 10.0).round() / 10.0 } else { 0.0 }
}

/// Two progress bars; drawn on a terminal only.
#[derive(Debug)]
pub(super) struct Bars {
    both: MultiProgress,
    storing: ProgressBar,
    relaying: ProgressBar,
    total: Total,
}

impl Bars {
    pub(super) fn new(total: Total) -> Self {
        let both = MultiProgress::new();
        let (length, unit) = match total {
            Total::Bytes(bytes) => (bytes, "{bytes}/{total_bytes}"),
            Total::Messages(messages) => (messages, "{pos}/{len}"),
        };
        let storing = both.add(styled(length, "enqueued ", unit));
        let relaying =
            both.add(styled(if let Total::Messages(n) = total { n } else { 0 }, "processed", "{pos}/{len}"));
        Self { both, storing, relaying, total }
    }

    pub(super) fn stored(&self, bytes: u64, messages: u64) {
        match self.total {
            Total::Bytes(_) => {
                self.storing.inc(bytes);
                self.relaying.set_length(messages);
            }
            Total::Messages(_) => self.storing.set_position(messages),
        }
    }

    pub(super) fn processed(&self, messages: u64) {
        self.relaying.set_position(messages);
    }

    /// A line on standard error, above the bars.
    pub(super) fn say(&self, text: &str) {
        self.both.suspend(|| complain(text));
    }

    pub(super) fn clear(&self) {
        self.storing.finish_and_clear();
        self.relaying.finish_and_clear();
    }
}

/// indicatif's own shows four decimals.
fn whole_rate(state: &ProgressState, text: &mut dyn Write) {
    let _ = write!(text, "{:.0}/s", state.per_sec());
}

fn styled(length: u64, name: &str, unit: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    match ProgressStyle::with_template(&format!("{name} {{bar:40}} {unit} {{rate}}")) {
        Ok(style) => bar.with_style(style.with_key("rate", whole_rate)),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(tally: Tally, trouble: Option<&str>) -> Report {
        Report {
            messages: 12,
            instances: 3,
            tally,
            shares: vec![(Uuid::nil(), 6), (Uuid::max(), 4)],
            refused: 2,
            refusals: vec![Refusal { line: 4, reason: "not JSON".into() }],
            enqueueing: Duration::from_millis(500),
            processing: Duration::from_secs(2),
            killed: None,
            false_evictions: 0,
            trouble: trouble.map(Into::into),
        }
    }

    #[test]
    fn the_json_report_is_one_object_with_every_promised_field() {
        let tally = Tally { enqueued: 10, processed: 10, streams: 5, ..Tally::default() };
        let text = report(tally, None).json();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (name, expected) in [
            ("messages", 12),
            ("streams", 5),
            ("instances", 3),
            ("enqueued", 10),
            ("processed", 10),
            ("lost", 0),
            ("duplicates", 0),
            ("order_violations", 0),
            ("redelivered", 0),
            ("refused", 2),
            ("false_evictions", 0),
            ("elapsed_ms", 2_000),
        ] {
            assert_eq!(value[name], expected, "{name}");
        }
        assert_eq!((&value["enqueue_per_second"], &value["process_per_second"]), (&json!(20.0), &json!(5.0)));
        assert_eq!(value["refusals"][0]["line"], 4);
        assert!(value["takeover_ms"].is_null(), "nobody was killed");
        assert!(!text.contains('\n'));
    }

    #[test]
    fn what_is_wrong_is_not_called_clean() {
        let lost = Tally { enqueued: 10, processed: 9, lost: 1, ..Tally::default() };
        assert!(!report(lost, None).is_clean());
        assert!(report(lost, None).text().ends_with("NOT CLEAN"));
        assert!(!report(Tally::default(), Some("stalled")).is_clean());
        assert!(report(Tally::default(), None).text().ends_with("out of order"));
    }
}
