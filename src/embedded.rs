//! A private, throwaway PostgreSQL, started from the server programs that are installed on this machine.
//!
//! The rule: nothing outlives its owner and nobody else gets in. The server listens on a Unix socket in a directory only its own
//! account may enter, runs as a direct child, and its readiness is read from *its* `postmaster.pid`. "The port answers" is never
//! proof: with a port already taken one would talk, without any error, to somebody else's database.
//!
//! Settings trade durability against power loss for speed (`fsync=off`), but keep `synchronous_commit=on`: with it off, a
//! `kill -9` of the server loses commits that were already acknowledged.
//!
//! ```no_run
//! # fn main() -> Result<(), workpump::embedded::EmbeddedError> {
//! use workpump::embedded::EmbeddedPostgres;
//!
//! let server = EmbeddedPostgres::builder().setting("max_prepared_transactions", "10").start()?;
//! println!("{}", server.url("postgres"));
//! # Ok(())
//! # }
//! ```

mod account;
mod guard;
mod private_dir;
mod programs;

use std::fs;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

pub use private_dir::PrivateDir;
pub use programs::ServerPrograms;

/// The port in the name of the socket file; no TCP port is opened unless a caller's setting asks for one.
const PORT: u16 = 5432;
/// How long a server may take from its start to "ready", recovery after a crash included.
const READY_WITHIN: Duration = Duration::from_mins(1);
/// How long a server may take to end before it is killed.
const END_WITHIN: Duration = Duration::from_secs(10);
/// How often a file or a child that sends no event is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why a private server could not be started or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// No PostgreSQL server programs were found.
    #[error(
        "no PostgreSQL server programs found ({looked}): run `{install}`, or set WORKPUMP_PG_BIN to the directory of initdb"
    )]
    NoServerPrograms {
        /// Where was looked.
        looked: String,
        /// The one line that installs them.
        install: &'static str,
    },
    /// The process runs as root, PostgreSQL refuses to, and there is no account to run it as.
    #[error(
        "PostgreSQL does not run as root and there is neither a user `postgres` nor `nobody`: create one, or start as another user"
    )]
    NoAccount,
    /// A file or a process could not be handled.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried, and on which file.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// `initdb` failed.
    #[error("initdb failed ({status}): {output}")]
    Initdb {
        /// How it ended.
        status: ExitStatus,
        /// What it printed.
        output: String,
    },
    /// The server ended instead of becoming ready.
    #[error("the private PostgreSQL ended while starting ({status}); the end of its log: {log}")]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// The last lines of its log.
        log: String,
    },
    /// The server did not become ready in time.
    #[error("the private PostgreSQL was not ready after {seconds} s; the end of its log: {log}")]
    NotReady {
        /// How long was waited.
        seconds: u64,
        /// The last lines of its log.
        log: String,
    },
}

impl EmbeddedError {
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }
}

/// What a private server shall be started with.
#[derive(Clone, Debug, Default)]
pub struct EmbeddedBuilder {
    settings: Vec<String>,
}

impl EmbeddedBuilder {
    /// Adds a server setting, as in `postgresql.conf`; it wins over the settings this module makes itself.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push(format!("{name}={value}"));
        self
    }

    /// Creates the database cluster, starts the server and waits until it accepts connections. Blocks for about a second.
    pub fn start(self) -> Result<EmbeddedPostgres, EmbeddedError> {
        let programs = ServerPrograms::find()?;
        let dir = PrivateDir::create()?;
        let mut initdb = dir.command(&programs.initdb());
        initdb.args(["--no-sync", "-A", "trust", "-E", "UTF8", "--locale=C", "-U", "postgres", "-D"]);
        initdb.arg(dir.path().join("data"));
        let done = initdb.output().map_err(|e| EmbeddedError::io("run initdb", e))?;
        if !done.status.success() {
            let output = [done.stdout, done.stderr].concat();
            let output = String::from_utf8_lossy(&output).trim().to_owned();
            return Err(EmbeddedError::Initdb { status: done.status, output });
        }
        let mut server = EmbeddedPostgres { child: None, programs, settings: self.settings, dir };
        server.launch()?;
        Ok(server)
    }

    /// [`EmbeddedBuilder::start`] for async code: the waiting is done on a thread for blocking work.
    pub async fn start_async(self) -> Result<EmbeddedPostgres, EmbeddedError> {
        match tokio::task::spawn_blocking(move || self.start()).await {
            Ok(started) => started,
            Err(e) => Err(EmbeddedError::io("start the server in the background", std::io::Error::other(e))),
        }
    }
}

/// A running private server. Dropping it ends the server and removes its directory; so does the end of this process, however it
/// comes about.
#[derive(Debug)]
pub struct EmbeddedPostgres {
    child: Option<Child>,
    programs: ServerPrograms,
    settings: Vec<String>,
    dir: PrivateDir,
}

impl EmbeddedPostgres {
    /// Begins the description of a server.
    #[must_use]
    pub fn builder() -> EmbeddedBuilder {
        EmbeddedBuilder::default()
    }

    /// Starts a server with nothing but the built-in settings. Blocks for about a second.
    pub fn start() -> Result<Self, EmbeddedError> {
        Self::builder().start()
    }

    /// The address of a database of this server, for `tokio-postgres`, libpq and `--database-url`. The user is a superuser.
    pub fn url(&self, dbname: &str) -> String {
        let host = self.dir.path().display().to_string().replace('%', "%25").replace('/', "%2F");
        format!("postgresql://postgres@{host}:{PORT}/{dbname}")
    }

    /// The directory of the Unix socket.
    pub fn socket_dir(&self) -> &Path {
        self.dir.path()
    }

    /// The data directory, for tests that edit `pg_hba.conf`.
    pub fn data_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("data")
    }

    /// The server's process id, `None` while it is stopped.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The directory of the server programs in use.
    pub fn programs(&self) -> &ServerPrograms {
        &self.programs
    }

    /// The last lines of the server's log.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.dir.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.trim_end().lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Makes the server read its configuration files again.
    pub fn reload(&self) {
        self.signal(Signal::HUP);
    }

    /// Stops the server in order: clients are disconnected, nothing is recovered at the next start.
    pub fn stop(&mut self) -> Result<(), EmbeddedError> {
        self.end_by(Signal::INT)
    }

    /// Stops the server at once, as `pg_ctl stop -m immediate` does: the next start recovers.
    pub fn stop_immediately(&mut self) -> Result<(), EmbeddedError> {
        self.end_by(Signal::QUIT)
    }

    /// Kills the server and all its processes with SIGKILL, as a crash of the machine's software would.
    pub fn kill_9(&mut self) -> Result<(), EmbeddedError> {
        // A stopped postmaster forks no further process between the listing and the kill.
        self.signal(Signal::STOP);
        let sessions = self.pid().map(guard::children_of).unwrap_or_default();
        let ended = self.end_by(Signal::KILL);
        for pid in sessions {
            send(pid, Signal::KILL);
        }
        ended
    }

    /// Starts the server again on the same data, after a stop or a kill; a running one is stopped in order first.
    pub fn restart(&mut self) -> Result<(), EmbeddedError> {
        self.stop()?;
        // Right after a kill the old sessions may still hold the shared memory; the server refuses to start until they are gone.
        for _ in 0..100 {
            match self.launch() {
                Err(EmbeddedError::Ended { log, .. }) if log.contains("shared memory block") => look_later(),
                other => return other,
            }
        }
        self.launch()
    }

    fn launch(&mut self) -> Result<(), EmbeddedError> {
        let log_path = self.dir.path().join("log");
        let log = fs::OpenOptions::new().create(true).append(true).open(&log_path);
        let log = log.map_err(|e| EmbeddedError::io(format!("open {}", log_path.display()), e))?;
        let log_too = log.try_clone().map_err(|e| EmbeddedError::io("share the server's log", e))?;
        let mut server = self.dir.command(&self.programs.postgres());
        server.arg("-D").arg(self.data_dir()).arg("-k").arg(self.dir.path()).stdout(log_too).stderr(log);
        let port = format!("port={PORT}");
        let own = ["listen_addresses=", "fsync=off", "full_page_writes=off", "synchronous_commit=on"];
        let own =
            own.into_iter().chain(["max_connections=200", "wal_level=minimal", "max_wal_senders=0", &port]);
        for setting in own.chain(self.settings.iter().map(String::as_str)) {
            server.args(["-c", setting]);
        }
        let child = self.dir.spawn(server)?;
        self.child = Some(child);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<(), EmbeddedError> {
        for _ in 0..READY_WITHIN.as_millis() / LOOK_EVERY.as_millis() {
            let Some(child) = self.child.as_mut() else { break };
            let pid = child.id();
            if let Some(status) = child.try_wait().map_err(|e| EmbeddedError::io("wait for the server", e))? {
                self.child = None;
                return Err(EmbeddedError::Ended { status, log: self.log_tail() });
            }
            if is_ready(&self.data_dir().join("postmaster.pid"), pid) {
                return Ok(());
            }
            look_later();
        }
        Err(EmbeddedError::NotReady { seconds: READY_WITHIN.as_secs(), log: self.log_tail() })
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            send(pid, signal);
        }
    }

    fn end_by(&mut self, signal: Signal) -> Result<(), EmbeddedError> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        send(child.id(), signal);
        // A test may have left it stopped.
        send(child.id(), Signal::CONT);
        for _ in 0..END_WITHIN.as_millis() / LOOK_EVERY.as_millis() {
            if child.try_wait().map_err(|e| EmbeddedError::io("wait for the server's end", e))?.is_some() {
                return Ok(());
            }
            look_later();
        }
        let killed = child.kill().and_then(|()| child.wait());
        killed.map(drop).map_err(|e| EmbeddedError::io("kill the server", e))
    }
}

impl Drop for EmbeddedPostgres {
    fn drop(&mut self) {
        // Nothing is worth saving: the directory goes next.
        drop(self.end_by(Signal::QUIT));
    }
}

/// Whether the lock file says that the server with this very pid accepts connections.
fn is_ready(lock_file: &Path, pid: u32) -> bool {
    let Ok(text) = fs::read_to_string(lock_file) else { return false };
    let mut lines = text.lines();
    lines.next().and_then(|line| line.trim().parse().ok()) == Some(pid)
        && lines.nth(6).is_some_and(|s| s.trim() == "ready")
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // An error means that it is gone already.
        let _ = kill_process(pid, signal);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "another process's lock file and exit send no event; callers block by contract"
)]
fn look_later() {
    std::thread::sleep(LOOK_EVERY);
}
