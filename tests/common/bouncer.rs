//! A real PgBouncer in transaction mode in front of a test server.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use tokio::net::UnixStream;
use workpump::embedded::{EmbeddedPostgres, PrivateDir};

use super::wait::eventually;

/// Not in everybody's PATH, therefore by its full name.
const PROGRAMS: [&str; 4] =
    ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/opt/homebrew/bin/pgbouncer", "/usr/local/bin/pgbouncer"];
const PORT: u16 = 6432;

/// A pooler of one test; ended with it.
pub struct Bouncer {
    child: Child,
    dir: PrivateDir,
}

impl Bouncer {
    /// Starts one with `pool_size` server connections per database. `None`, with a reason printed, where PgBouncer is not installed.
    pub async fn in_front_of(server: &EmbeddedPostgres, pool_size: u32) -> Option<Self> {
        Self::with_settings(server, pool_size, "").await
    }

    /// The same with more lines of configuration.
    pub async fn with_settings(server: &EmbeddedPostgres, pool_size: u32, settings: &str) -> Option<Self> {
        let Some(program) = PROGRAMS.iter().map(Path::new).find(|program| program.is_file()) else {
            eprintln!("skipped: PgBouncer is not installed (apt-get install pgbouncer)");
            return None;
        };
        let mut dir = PrivateDir::create().expect("a directory for PgBouncer");
        let own = dir.path().display();
        let config = format!(
            "[databases]\n* = host={} port=5432 user=postgres\n\
             [pgbouncer]\nlisten_addr =\nlisten_port = {PORT}\nunix_socket_dir = {own}\nauth_type = any\n\
             pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 500\n\
             logfile = {own}/pgbouncer.log\nadmin_users = postgres\n{}{settings}\n",
            server.socket_dir().display(),
            no_prepared_statements(program)
        );
        let config = dir.write("pgbouncer.ini", &config).expect("PgBouncer's configuration");
        let mut command = dir.command(program);
        command.arg("-q").arg(config).stdout(Stdio::null()).stderr(Stdio::null());
        let child = dir.spawn(command).expect("PgBouncer starts");
        let mut bouncer = Self { child, dir };
        bouncer.wait_until_it_answers().await;
        Some(bouncer)
    }

    /// The address of a database through the pooler.
    pub fn url(&self, dbname: &str) -> String {
        let host = self.dir.path().display().to_string().replace('%', "%25").replace('/', "%2F");
        format!("postgresql://postgres@{host}:{PORT}/{dbname}")
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("pgbouncer.log")).unwrap_or_default()
    }

    /// The pooler's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The socket lies in a directory that is ours alone: whoever answers there is our child.
    async fn wait_until_it_answers(&mut self) {
        let socket = self.dir.path().join(format!(".s.PGSQL.{PORT}"));
        eventually(&format!("an answer of PgBouncer on {}", socket.display()), async || {
            if let Some(status) = self.child.try_wait().expect("PgBouncer's state") {
                panic!("PgBouncer ended while starting ({status}): {}", self.log());
            }
            UnixStream::connect(&socket).await.is_ok()
        })
        .await;
    }
}

/// Since 1.21 a pooler can carry named statements from session to session; then it would hide those that should not be there. Before,
/// it has no such setting, and refuses to start with it.
fn no_prepared_statements(program: &Path) -> &'static str {
    let version = Command::new(program).arg("--version").output().expect("PgBouncer's version");
    let version = String::from_utf8_lossy(&version.stdout);
    let number = version.lines().next().and_then(|line| line.strip_prefix("PgBouncer ")).unwrap_or_default();
    let mut parts = number.split('.').map_while(|part| part.parse::<u32>().ok());
    let known = (parts.next(), parts.next()) >= (Some(1), Some(21));
    if known { "max_prepared_statements = 0\n" } else { "" }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
