//! `workpump relay`: one instance of the pump as a process of its own.
//!
//! The rule: a line is in the file before its row is settled. A relay that is killed in between writes the line again elsewhere, which
//! readers can tell by `message_id` and a higher `claim_epoch`; the other way round a message would be lost.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use uuid::Uuid;
use workpump::{DrainReport, Failure, OutboxMessage, Publisher, WorkPump};

use super::append::Appender;
use super::{CliError, Database, Outcome, Stop, from_env};

/// Lines of one write. More would only make the rows of a failed write more.
const BATCH: usize = 500;

/// The arguments of `workpump relay`.
#[derive(Args)]
pub(super) struct Relay {
    /// File to append to, one JSON line a message; `-` is standard output
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
    #[command(flatten)]
    database: Database,
    /// The same database without a pooler in between, for notifications and locks [env: WORKPUMP_DIRECT_URL]
    #[arg(long, value_name = "URL")]
    direct_url: Option<String>,
}

impl Relay {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        let appender =
            Appender::open(&self.to).map_err(CliError::io(format!("append to {}", self.to.display())))?;
        let reader_gone = Arc::new(Notify::new());
        let publisher =
            Lines { appender: Arc::new(Mutex::new(appender)), reader_gone: Arc::clone(&reader_gone) };
        let options = match from_env("WORKPUMP_CONFIG")? {
            Some(file) => workpump::config::from_file(file),
            None => workpump::config::from_env(),
        };
        let options = options.map_err(|e| CliError::Usage(e.to_string()))?;
        let mut builder =
            WorkPump::builder(self.database.url()?).schema(self.database.schema()?).options(options);
        if let Some(direct) =
            self.direct_url.clone().map_or_else(|| from_env("WORKPUMP_DIRECT_URL"), |url| Ok(Some(url)))?
        {
            builder = builder.direct_url(direct);
        }
        let (mut stop, mut at_once) = (Stop::listen()?, quit_signal()?);
        let pump = tokio::select! {
            pump = builder.service_name("workpump-relay").publisher(publisher).start() => pump?,
            () = stop.asked() => return Ok(Outcome::Interrupted),
        };
        tracing::info!(instance_id = %pump.instance_id(), to = %self.to.display(), "relaying");
        let broken = tokio::select! {
            () = stop.asked() => false,
            () = reader_gone.notified() => true,
            // The owner of this process is gone. The rows are in the table, and whoever takes over has them.
            _ = at_once.recv() => return Ok(Outcome::Interrupted),
        };
        let drained = tokio::select! {
            drained = pump.drain() => drained,
            () = stop.asked() => return Ok(Outcome::Interrupted),
            _ = at_once.recv() => return Ok(Outcome::Interrupted),
        };
        tracing::info!(?drained, "drained");
        let DrainReport { abandoned, unsettled, deregistered, .. } = drained;
        if abandoned > 0 || unsettled > 0 || !deregistered {
            let left = if deregistered { "" } else { ", and this instance is still a member" };
            let what = format!(
                "{abandoned} writes did not end, {unsettled} rows were written but not settled{left}"
            );
            return Err(CliError::Failed(format!(
                "drained in part: {what}; the rows come again when their leases end"
            )));
        }
        if broken {
            return Err(CliError::Failed("the reader of the output is gone".to_owned()));
        }
        Ok(Outcome::Well)
    }
}

/// The signal that a parent's death sends.
fn quit_signal() -> Result<Signal, CliError> {
    signal(SignalKind::quit()).map_err(CliError::io("listen to signals"))
}

/// Relays messages as lines.
struct Lines {
    appender: Arc<Mutex<Appender>>,
    reader_gone: Arc<Notify>,
}

impl Publisher for Lines {
    async fn publish_one(&self, message: &OutboxMessage) -> workpump::Outcome {
        let answers = self.publish(std::slice::from_ref(message)).await;
        answers.into_iter().next().unwrap_or_else(|| Err(Failure::retry("not written")))
    }

    fn max_batch(&self) -> usize {
        BATCH
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<workpump::Outcome> {
        let (mut lines, mut ends, mut invalid) = (Vec::new(), Vec::new(), Vec::new());
        for (at, message) in batch.iter().enumerate() {
            match write_line(&mut lines, message) {
                Ok(()) => ends.push(lines.len()),
                Err(e) => invalid.push((at, e)),
            }
        }
        let appender = Arc::clone(&self.appender);
        let count = ends.len();
        // A full pipe or a lock held by another process must not hold up the pump.
        let written = tokio::task::spawn_blocking(move || {
            appender.lock().unwrap_or_else(PoisonError::into_inner).append(&lines, &ends)
        });
        let (whole, error) = match written.await {
            Ok(done) => (done.lines, done.error),
            Err(e) => (0, Some(std::io::Error::other(e))),
        };
        if error.as_ref().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
            self.reader_gone.notify_one();
        }
        let reason = error.map_or_else(|| "not written".to_owned(), |e| format!("cannot append: {e}"));
        let written = |line: usize| if line < whole { Ok(()) } else { Err(Failure::retry(reason.clone())) };
        let mut answers: Vec<_> = (0..count).map(written).collect();
        for (at, reason) in invalid {
            answers.insert(at, Err(Failure::permanent(reason)));
        }
        answers
    }
}

/// One relayed message. `message_id` comes first: that is how an unfinished line of ours is known.
#[derive(Serialize)]
struct Line<'a> {
    message_id: Uuid,
    stream_id: Option<Uuid>,
    message_type: &'a str,
    destination: Option<&'a str>,
    instance_id: String,
    claim_epoch: i64,
    attempts: u32,
    payload: &'a RawValue,
    metadata: Option<&'a RawValue>,
}

/// Appends one message as one line, or nothing.
fn write_line(lines: &mut Vec<u8>, message: &OutboxMessage) -> Result<(), String> {
    let start = lines.len();
    let written = (|| {
        let line = Line {
            message_id: message.message_id,
            stream_id: message.stream_id,
            message_type: &message.message_type,
            destination: message.destination.as_deref(),
            instance_id: message.instance_id.to_string(),
            claim_epoch: message.claim_epoch,
            attempts: message.attempts,
            payload: serde_json::from_slice(&message.payload)?,
            metadata: message.metadata.as_deref().map(serde_json::from_slice).transpose()?,
        };
        serde_json::to_writer(&mut *lines, &line)
    })();
    if let Err(e) = written {
        lines.truncate(start);
        return Err(format!("message {} cannot be written as JSON: {e}", message.message_id));
    }
    // A line end can stand between values only, never inside a string: as a space it means the same.
    for byte in lines[start..].iter_mut().filter(|byte| matches!(**byte, b'\n' | b'\r')) {
        *byte = b' ';
    }
    lines.push(b'\n');
    Ok(())
}
