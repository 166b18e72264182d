//! `workpump enqueue`: JSON lines into the outbox.
//!
//! The rule: a bad line is refused with its number and the reason, and everything else is stored. What was done is said in lines, so
//! that one knows where to go on.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;
use workpump::NewOutbox;

use super::lines::{Entry, Lines, in_batches, json_fault};
use super::store::Store;
use super::{CliError, Database, Outcome, Stop, complain, print};

/// Refusals that the JSON report lists; standard error has them all.
pub(super) const LISTED: usize = 1_000;

/// The arguments of `workpump enqueue`.
///
/// Each line is an object with `message_type` and `payload`, and optionally `message_id`, `stream_id` (UUIDs), `destination`,
/// `metadata` and `scheduled_for` (RFC 3339).
#[derive(Args)]
pub(super) struct Enqueue {
    /// The lines; `-` or nothing is standard input
    #[arg(value_name = "FILE")]
    input: Option<PathBuf>,
    #[command(flatten)]
    database: Database,
    /// Print one JSON object instead of a sentence
    #[arg(long)]
    json: bool,
}

/// A line that was not stored.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Refusal {
    pub(super) line: u64,
    pub(super) reason: String,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    lines: u64,
    enqueued: u64,
    existing: u64,
    refused: u64,
    refusals: Vec<Refusal>,
    interrupted: bool,
}

impl Enqueue {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let (url, schema) = (self.database.url()?, self.database.schema()?);
        let (reader, length) = open(self.input.as_deref())?;
        let mut store = Store::open(&url, &schema).await?;
        let bar = progress(length);
        let mut batches = in_batches(Box::new(Lines::new(reader, |line: String| message(&line))));
        let mut report = Report::default();
        let mut stop = Stop::listen()?;
        loop {
            let batch = tokio::select! {
                batch = batches.recv() => batch,
                () = stop.asked() => {
                    report.interrupted = true;
                    None
                }
            };
            let Some(batch) = batch else { break };
            let last_stored = report.lines;
            let batch = batch.map_err(|source| CliError::Io {
                what: format!("read on after line {last_stored}"),
                source,
            })?;
            bar.inc(batch.iter().map(|entry| entry.bytes as u64).sum());
            if let Err(e) = report.take(&mut store, batch, &bar).await {
                bar.finish_and_clear();
                let lines = format!("lines up to {last_stored} are done, of the next some may be stored");
                return Err(CliError::Failed(format!("{e}; {lines}")));
            }
        }
        bar.finish_and_clear();
        print(&if self.json {
            serde_json::to_string(&report).map_err(|e| CliError::Failed(e.to_string()))?
        } else {
            report.sentence()
        });
        Ok(match (report.interrupted, report.refused) {
            (true, _) => Outcome::Interrupted,
            (false, 0) => Outcome::Well,
            (false, _) => Outcome::Flawed,
        })
    }
}

impl Report {
    async fn take(
        &mut self,
        store: &mut Store,
        batch: Vec<Entry<NewOutbox>>,
        bar: &ProgressBar,
    ) -> Result<(), CliError> {
        let last_line = batch.last().map_or(self.lines, |entry| entry.line);
        let (mut numbers, mut messages, mut refusals) = (Vec::new(), Vec::new(), Vec::new());
        for Entry { line, value, .. } in batch {
            match value {
                Ok(message) => {
                    numbers.push(line);
                    messages.push(message);
                }
                Err(reason) => refusals.push(Refusal { line, reason }),
            }
        }
        let stored = store.store(&messages).await?;
        refusals.extend(stored.refused.into_iter().map(|(at, reason)| Refusal { line: numbers[at], reason }));
        refusals.sort_by_key(|refusal| refusal.line);
        self.enqueued += stored.new;
        self.existing += stored.existing;
        self.lines = last_line;
        for refusal in refusals {
            bar.suspend(|| complain(&format!("line {} refused: {}", refusal.line, refusal.reason)));
            self.refused += 1;
            if self.refusals.len() < LISTED {
                self.refusals.push(refusal);
            }
        }
        Ok(())
    }

    fn sentence(&self) -> String {
        let existing =
            if self.existing > 0 { format!(", {} were there before", self.existing) } else { String::new() };
        let end =
            if self.interrupted { format!("; interrupted after line {}", self.lines) } else { String::new() };
        format!("{} enqueued{existing}, {} refused{end}", self.enqueued, self.refused)
    }
}

fn open(path: Option<&Path>) -> Result<(Box<dyn Read + Send>, Option<u64>), CliError> {
    if let Some(path) = path.filter(|path| *path != Path::new("-")) {
        let file = open_input(path)?;
        let length = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|meta| meta.len());
        return Ok((Box::new(file), length));
    }
    if io::stdin().is_terminal() {
        complain("reading JSON lines from the terminal; Ctrl-D ends");
    }
    Ok((Box::new(io::stdin()), None))
}

/// Opens a file of lines; a directory would only fail at the first read.
pub(super) fn open_input(path: &Path) -> Result<File, CliError> {
    let file = File::open(path).map_err(CliError::io(format!("open {}", path.display())))?;
    if file.metadata().is_ok_and(|meta| meta.is_dir()) {
        return Err(CliError::Usage(format!("{} is a directory; give a file of JSON lines", path.display())));
    }
    Ok(file)
}

/// A bar over the bytes of a file, or a spinner; on a terminal only.
fn progress(length: Option<u64>) -> ProgressBar {
    let bar = length.map_or_else(ProgressBar::no_length, ProgressBar::new);
    let template = if length.is_some() {
        "{bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}"
    } else {
        "{spinner} {bytes} {binary_bytes_per_sec}"
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    message_type: String,
    #[serde(borrow)]
    payload: &'a RawValue,
    message_id: Option<Uuid>,
    stream_id: Option<Uuid>,
    destination: Option<String>,
    metadata: Option<&'a RawValue>,
    scheduled_for: Option<String>,
}

fn message(line: &str) -> Result<NewOutbox, String> {
    // Only at fault with an object: for "17" serde would complain about an expected struct.
    if !line.trim_start().starts_with('{') && serde_json::from_str::<&RawValue>(line).is_ok() {
        return Err("not an object; a message is an object with message_type and payload".to_owned());
    }
    let fields: Fields<'_> = serde_json::from_str(line).map_err(|e| json_fault(&e))?;
    let mut message = NewOutbox::new(fields.message_type, fields.payload);
    if let Some(id) = fields.message_id {
        message = message.id(id);
    }
    if let Some(stream) = fields.stream_id {
        message = message.stream(stream);
    }
    if let Some(destination) = fields.destination {
        message = message.destination(destination);
    }
    if let Some(metadata) = fields.metadata {
        message = message.metadata(metadata);
    }
    if let Some(due) = fields.scheduled_for {
        message = message.scheduled_for(instant(&due)?);
    }
    Ok(message)
}

/// An instant in RFC 3339 form; one without an offset would mean something else on each machine.
fn instant(text: &str) -> Result<SystemTime, String> {
    let wrong = || format!("scheduled_for {text:?} is no RFC 3339 instant such as 2030-01-31T08:00:00Z");
    let parsed: toml::value::Datetime = text.parse().map_err(|_| wrong())?;
    let (Some(date), Some(time), Some(offset)) = (parsed.date, parsed.time, parsed.offset) else {
        return Err(wrong());
    };
    let offset_minutes = match offset {
        toml::value::Offset::Z => 0,
        toml::value::Offset::Custom { minutes } => i64::from(minutes),
    };
    let minutes =
        days_since_1970(date) * 1_440 + i64::from(time.hour) * 60 + i64::from(time.minute) - offset_minutes;
    let seconds = minutes * 60 + i64::from(time.second.unwrap_or(0));
    let nanos = time.nanosecond.unwrap_or(0);
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let at = if seconds < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(whole)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(whole)
    };
    at.and_then(|at| at.checked_add(Duration::from_nanos(u64::from(nanos)))).ok_or_else(wrong)
}

/// The civil calendar, counted in years that begin in March so that the leap day comes last.
fn days_since_1970(date: toml::value::Date) -> i64 {
    let (month, day) = (i64::from(date.month), i64::from(date.day));
    let year = i64::from(date.year) - i64::from(month <= 2);
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_are_read_with_their_offset() {
        let seconds =
            |text: &str| instant(text).unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        assert_eq!(seconds("1970-01-01T00:00:00Z").to_string(), "0");
        assert_eq!(seconds("2000-02-29T12:00:00+02:00").to_string(), "951818400");
        assert_eq!(seconds("2026-11-30T14:43:00.250Z").to_string(), "1796049780.25");
        assert!(instant("1969-12-31T23:59:59Z").unwrap() < SystemTime::UNIX_EPOCH);
        for wrong in ["tomorrow", "2026-11-30", "2026-11-30T14:43:00", "2026-13-01T00:00:00Z"] {
            assert!(instant(wrong).unwrap_err().contains(wrong));
        }
    }

    #[test]
    fn a_message_needs_its_type_and_its_payload_and_nothing_unknown() {
        let id = "00000000-0000-0000-0000-000000000001";
        let whole = message(&format!(
            r#"{{"message_type":"a","payload":{{"x":[1]}},"stream_id":"{id}","message_id":"{id}"}}"#
        ));
        assert_eq!(whole.unwrap().message_id().to_string(), id);
        for (line, expected) in [
            (r#"{"payload":1}"#, "missing field `message_type`"),
            (r#"{"message_type":"a"}"#, "missing field `payload`"),
            (r#"{"message_type":"a","payload":1,"streamid":1}"#, "unknown field `streamid`"),
            (r#"{"message_type":"a","payload":1,"stream_id":"x"}"#, "UUID"),
            (r#"{"message_type":"a","payload":1"#, "not JSON: EOF"),
            ("17", "not an object"),
            ("nonsense", "not JSON"),
        ] {
            let refused = message(line).err().unwrap();
            assert!(refused.contains(expected), "{line}: {refused}");
        }
    }
}
