//! `workpump demo`: the main job on real input, and a check of every promise that can be checked from outside.
//!
//! The rule: the demo uses what users use. It stores through the library, relays through `workpump relay` in processes of their own,
//! and judges by the relayed lines alone. A database that is not its own is touched only in a schema of the run's own, which is
//! dropped afterwards: no message of anybody else is ever relayed by a demo. (One that is killed leaves its schema, `workpump_demo_…`.)

mod kill;
mod ledger;
mod orders;
mod relays;
mod report;
mod run;
mod source;
mod tail;

use std::path::PathBuf;

use clap::Args;
use uuid::Uuid;
use workpump::embedded::EmbeddedPostgres;

use self::orders::Orders;
use self::report::Report;
use self::run::Run;
use self::source::Draft;
use super::enqueue::open_input;
use super::lines::{Lines, Source};
use super::{CliError, Outcome, Stop, complain, from_env, print};

/// Messages that are generated when nothing else is said.
const MESSAGES: u64 = 10_000;
/// Streams of the generated messages when nothing else is said.
const STREAMS: u64 = 200;

/// The arguments of `workpump demo`.
#[derive(Args)]
pub(super) struct Demo {
    /// Relaying processes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    instances: u32,
    /// JSON lines to relay, any value a line; generated orders if not given
    #[arg(long, value_name = "FILE.jsonl")]
    input: Option<PathBuf>,
    /// Field whose text names a line's stream; dots lead into nested objects. The stream id is the UUIDv5 of that text in the OID
    /// namespace. Without it, lines are relayed in no particular order
    #[arg(long, value_name = "FIELD", requires = "input")]
    stream_key: Option<String>,
    /// Messages to generate [default: 10000]
    #[arg(long, value_name = "N", conflicts_with = "input")]
    messages: Option<u64>,
    /// Streams to generate them in [default: 200]
    #[arg(long, value_name = "N", conflicts_with = "input", value_parser = clap::value_parser!(u64).range(1..))]
    streams: Option<u64>,
    /// Database to use, in a schema of the run's own; a private throwaway PostgreSQL if not given [env: WORKPUMP_DATABASE_URL]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
    /// Kill the busiest instance with `kill -9` in mid-run, and report how soon the others took its rows over
    #[arg(long)]
    kill: bool,
    /// Print one JSON object instead of a report
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(super) async fn run(self) -> Result<Outcome, CliError> {
        if self.kill && self.instances < 2 {
            let text =
                "--kill needs --instances 2 or more: somebody has to take over from the one that is killed";
            return Err(CliError::Usage(text.to_owned()));
        }
        let source = self.source()?;
        let mut stop = Stop::listen()?;
        let database = tokio::select! {
            database = Scratch::open(self.database_url.clone()) => database?,
            () = stop.asked() => return Ok(Outcome::Interrupted),
        };
        let done = tokio::select! {
            done = self.relay_and_check(&database, source) => done.map(Some),
            () = stop.asked() => Ok(None),
        };
        // Whatever happened: nothing of the run stays behind.
        database.close().await;
        let Some(report) = done? else { return Ok(Outcome::Interrupted) };
        print(&if self.json { report.json() } else { report.text() });
        if let Some(trouble) = &report.trouble {
            complain(&format!("error: {trouble}"));
        }
        Ok(if report.is_clean() { Outcome::Well } else { Outcome::Flawed })
    }

    async fn relay_and_check(
        &self,
        database: &Scratch,
        source: Box<dyn Source<Draft>>,
    ) -> Result<Report, CliError> {
        workpump::migrate(&database.url, &database.schema).await?;
        let run = Run::start(&database.url, &database.schema, self.instances).await?;
        run.finish(source, self.total(), self.kill).await
    }

    fn source(&self) -> Result<Box<dyn Source<Draft>>, CliError> {
        let Some(path) = &self.input else {
            let streams = self.streams.unwrap_or(STREAMS);
            return Ok(Box::new(Orders::new(self.messages.unwrap_or(MESSAGES), streams)));
        };
        let key = self.stream_key.clone();
        Ok(Box::new(Lines::new(open_input(path)?, move |line: String| source::draft(line, key.as_deref()))))
    }

    /// What the progress bar of the storing counts up to: bytes of a file, or messages.
    fn total(&self) -> Total {
        match &self.input {
            Some(path) => Total::Bytes(std::fs::metadata(path).map_or(0, |meta| meta.len())),
            None => Total::Messages(self.messages.unwrap_or(MESSAGES)),
        }
    }
}

/// How much there is to store.
#[derive(Clone, Copy, Debug)]
enum Total {
    Bytes(u64),
    Messages(u64),
}

/// The database of one run.
struct Scratch {
    url: String,
    schema: String,
    /// Ends with the run; `None` when the database is the user's.
    server: Option<EmbeddedPostgres>,
}

impl Scratch {
    async fn open(url: Option<String>) -> Result<Self, CliError> {
        if let Some(url) = url.map_or_else(|| from_env("WORKPUMP_DATABASE_URL"), |url| Ok(Some(url)))? {
            let schema = format!("workpump_demo_{}", &Uuid::now_v7().simple().to_string()[20..]);
            return Ok(Self { url, schema, server: None });
        }
        let server = EmbeddedPostgres::builder().start_async().await?;
        Ok(Self { url: server.url("postgres"), schema: "public".to_owned(), server: Some(server) })
    }

    async fn close(self) {
        if self.server.is_some() {
            return;
        }
        if let Err(e) = workpump::drop_schema(&self.url, &self.schema).await {
            complain(&format!("could not drop the schema {} of this run: {e}", self.schema));
        }
    }
}
