//! The command line: arguments in, exit code out.
//!
//! The rule: this room uses the library as any user does, through its public face, and nothing is printed before passwords were taken
//! out of it. Results go to standard output, everything else to standard error, so that both can be piped.
//!
//! Exit codes: 0 all is well; 1 it failed; 2 the arguments or settings are wrong; 3 it finished, but something was refused (`enqueue`),
//! lost, doubled or out of order (`demo`), or not healthy (`doctor`); 130 interrupted.

#![allow(
    clippy::doc_markdown,
    reason = "the comments of arguments are help texts, in which backticks would show"
)]

mod append;
mod demo;
mod doctor;
mod enqueue;
mod lines;
mod migrate;
mod relay;
mod secrets;
mod status;
mod store;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use secrets::{ScrubbedStderr, scrub};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All is well.
    Well,
    /// It finished, and found or refused something.
    Flawed,
    /// A signal ended it early.
    Interrupted,
}

/// Why a command did not finish.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// The arguments or the environment are wrong.
    #[error("{0}")]
    Usage(String),
    /// The library failed.
    #[error(transparent)]
    Pump(#[from] workpump::Error),
    /// The schema could not be brought up to date.
    #[error(transparent)]
    Migrate(#[from] workpump::MigrateError),
    /// A batch could not be stored.
    #[error(transparent)]
    Enqueue(#[from] workpump::EnqueueError),
    /// PostgreSQL refused a statement of the program's own.
    #[error("database: {}", database_reason(.0))]
    Database(#[from] tokio_postgres::Error),
    /// The private server failed.
    #[error(transparent)]
    Embedded(#[from] workpump::embedded::EmbeddedError),
    /// A file or a process failed.
    #[error("cannot {what}: {source}")]
    Io { what: String, source: io::Error },
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// What the server said; the driver's own text is only "db error".
fn database_reason(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => std::error::Error::source(error)
            .map_or_else(|| error.to_string(), |source| format!("{error}: {source}")),
    }
}

/// A reliable work pump on PostgreSQL: messages stored in your own transactions are relayed in per-stream order by any number of
/// instances.
#[derive(Parser)]
#[command(name = "workpump", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create or update the schema. Safe to run from many processes at once.
    Migrate(migrate::Migrate),
    /// Show instances, leases, and the depth and oldest age of each category.
    Status(status::Status),
    /// Examine connections, rights, schema, server and instances, and say what to do. Changes nothing, ends within 15 s.
    Doctor(doctor::Doctor),
    /// Store messages in the outbox: JSON lines from a file or standard input.
    Enqueue(enqueue::Enqueue),
    /// Run one instance that relays the outbox to a file or to standard output.
    Relay(relay::Relay),
    /// Relay a file's lines (or generated orders) through several instances and check that nothing is lost, doubled or out of order.
    Demo(demo::Demo),
}

/// Which database, and where in it.
#[derive(Args, Clone)]
struct Database {
    /// Database to use, as URL or as `key=value` settings [env: WORKPUMP_DATABASE_URL]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
    /// Schema of the pump's tables [env: WORKPUMP_SCHEMA] [default: public]
    #[arg(long, value_name = "NAME")]
    schema: Option<String>,
}

impl Database {
    fn url(&self) -> Result<String, CliError> {
        let url = self
            .database_url
            .clone()
            .map_or_else(|| from_env("WORKPUMP_DATABASE_URL"), |url| Ok(Some(url)))?;
        url.ok_or_else(|| {
            CliError::Usage("no database: give --database-url URL or set WORKPUMP_DATABASE_URL".to_owned())
        })
    }

    fn schema(&self) -> Result<String, CliError> {
        let schema =
            self.schema.clone().map_or_else(|| from_env("WORKPUMP_SCHEMA"), |schema| Ok(Some(schema)))?;
        Ok(schema.unwrap_or_else(|| "public".to_owned()))
    }
}

/// A setting from the environment; an empty one counts as not set.
fn from_env(name: &str) -> Result<Option<String>, CliError> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(CliError::Usage(format!("{name} is not UTF-8 text"))),
    }
}

/// Runs the program with the arguments of this process.
pub(crate) fn main() -> ExitCode {
    run(std::env::args_os().collect())
}

fn run(arguments: Vec<OsString>) -> ExitCode {
    let command = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli.command,
        Err(e) => {
            let text = scrub(&e.render().to_string());
            if e.use_stderr() {
                complain(text.trim_end());
            } else {
                print(text.trim_end());
            }
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    start_log(matches!(command, Command::Relay(_)));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            complain(&format!("error: cannot start the runtime: {e}"));
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(async {
        match command {
            Command::Migrate(command) => command.run().await,
            Command::Status(command) => command.run().await,
            Command::Doctor(command) => command.run().await,
            Command::Enqueue(command) => command.run().await,
            Command::Relay(command) => command.run().await,
            Command::Demo(command) => command.run().await,
        }
    });
    // Not waited for: a write to a pipe that nobody reads would never end.
    runtime.shutdown_background();
    match done {
        Ok(Outcome::Well) => ExitCode::SUCCESS,
        Ok(Outcome::Flawed) => ExitCode::from(3),
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        Err(e) => {
            complain(&format!("error: {e}"));
            ExitCode::from(if matches!(e, CliError::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// The log goes to standard error; `RUST_LOG` chooses what.
fn start_log(talkative: bool) {
    let default = if talkative { "info" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(|| ScrubbedStderr)
        .init();
}

/// A result, on standard output. A reader that went away is no error worth a message.
fn print(text: &str) {
    drop(writeln!(io::stdout(), "{}", scrub(text)));
}

/// Anything else, on standard error.
fn complain(text: &str) {
    drop(writeln!(io::stderr(), "{}", scrub(text)));
}

/// The wish of somebody outside that this process ends. Listening begins with the value, so no signal is missed before it is awaited.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    fn listen() -> Result<Self, CliError> {
        let listen = |kind| signal(kind).map_err(CliError::io("listen to signals"));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Ends at Ctrl-C and SIGTERM; may be awaited again, for those who ask twice.
    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
