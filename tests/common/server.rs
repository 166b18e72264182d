//! The server of a test binary, and a database of its own for each test.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, OnceLock, mpsc};

use tokio_postgres::{Client, NoTls};
use workpump::embedded::EmbeddedPostgres;

use super::bouncer::Bouncer;

/// The database every test's own is copied from.
const TEMPLATE: &str = "workpump_template";

/// Fills the template. The one place that knows how a schema comes into being.
async fn migrate(url: &str) {
    workpump::migrate(url, "public").await.unwrap_or_else(|e| panic!("migrate {url}: {e}"));
}

/// A connection that is driven in the background of the test's runtime.
pub async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|e| panic!("connect to {url}: {e:?}"));
    tokio::spawn(connection);
    client
}

/// The binary whose databases are reached through a pooler; every other one goes straight to the server.
const POOLED: &str = "pooled";

/// Server connections of that pooler for each database: fewer than the busiest test has sessions, so that they do change hands.
const POOL_SIZE: u32 = 10;

/// A failed login is tried again soon, since some tests restart the server; and a wait that would last for ever ends as an error.
const POOLER_SETTINGS: &str = "server_login_retry = 1\nquery_timeout = 150";

/// A server of one test alone, which that test may stop, kill and restart.
pub struct PrivateServer {
    /// The server itself.
    pub postgres: EmbeddedPostgres,
    /// What its databases are reached through in the pooled binary.
    bouncer: Option<Bouncer>,
}

/// A server with the given settings, such as `("shared_preload_libraries", "pg_stat_statements")`.
pub fn server_with(settings: &[(&str, &str)]) -> PrivateServer {
    let builder = EmbeddedPostgres::builder()
        .setting("max_prepared_transactions", "20")
        .setting("max_connections", "300");
    let builder = settings.iter().fold(builder, |builder, (name, value)| builder.setting(name, value));
    let postgres = builder.start().expect("a private PostgreSQL");
    // A thread and a runtime of its own: the caller may be inside a test's runtime, or in none.
    let prepared = std::thread::scope(|scope| scope.spawn(|| runtime().block_on(prepare(&postgres))).join());
    let bouncer = prepared.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    PrivateServer { postgres, bouncer }
}

/// Fills the template, and starts the pooler where there shall be one.
async fn prepare(postgres: &EmbeddedPostgres) -> Option<Bouncer> {
    prepare_template(&postgres.url("postgres"), &postgres.url(TEMPLATE)).await;
    if env!("CARGO_CRATE_NAME") != POOLED {
        return None;
    }
    let bouncer = Bouncer::with_settings(postgres, POOL_SIZE, POOLER_SETTINGS).await;
    Some(bouncer.expect("these tests are about PgBouncer: install it with scripts/system-packages all"))
}

/// The server that all tests of this binary share. Ended by its guard when the test binary is gone: statics are never dropped.
pub fn shared() -> &'static PrivateServer {
    static SERVER: OnceLock<PrivateServer> = OnceLock::new();
    SERVER.get_or_init(|| server_with(&[]))
}

/// A migrated database of the shared server, for one test.
pub async fn database() -> Database {
    shared().database().await
}

/// An unmigrated database of the shared server, for tests of the migrations themselves.
pub async fn empty_database() -> Database {
    shared().empty_database().await
}

impl PrivateServer {
    /// A migrated database.
    pub async fn database(&self) -> Database {
        self.create(&format!("template {TEMPLATE} strategy file_copy")).await
    }

    /// An empty database.
    pub async fn empty_database(&self) -> Database {
        self.create("template template0 strategy file_copy").await
    }

    async fn create(&self, how: &str) -> Database {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let maintenance = self.postgres.url("postgres");
        let client = connect(&maintenance).await;
        client.batch_execute(&format!("create database {name} {how}")).await.expect("a new database");
        let direct_url = self.postgres.url(&name);
        let url = self.bouncer.as_ref().map_or_else(|| direct_url.clone(), |bouncer| bouncer.url(&name));
        Database { name, url, direct_url, maintenance }
    }
}

/// A test's own database. Dropped in the background after the test, whoever is still connected.
pub struct Database {
    name: String,
    url: String,
    direct_url: String,
    maintenance: String,
}

impl Database {
    /// Its address by the route of this binary; the user is a superuser.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its address past any pooler.
    pub fn direct_url(&self) -> &str {
        &self.direct_url
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address for another user, created with `create role … login`; the server trusts every user. Always direct: the tests'
    /// pooler makes everybody the superuser.
    pub fn url_as(&self, user: &str) -> String {
        self.direct_url.replacen("//postgres@", &format!("//{user}@"), 1)
    }

    /// A connection of the superuser by the route of this binary.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
    }

    /// A connection past any pooler, for what only a session of its own has: LISTEN, session locks, a backend that is looked at.
    pub async fn connect_direct(&self) -> Client {
        connect(&self.direct_url).await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // The janitor may be gone, or the server: then there is nothing to tidy.
        drop(JANITOR.send((self.maintenance.clone(), self.name.clone())));
    }
}

static JANITOR: LazyLock<mpsc::Sender<(String, String)>> = LazyLock::new(|| {
    let (send, inbox) = mpsc::channel::<(String, String)>();
    std::thread::spawn(move || {
        let runtime = runtime();
        for (maintenance, name) in inbox {
            runtime.block_on(async {
                let Ok((client, connection)) = tokio_postgres::connect(&maintenance, NoTls).await else {
                    return;
                };
                let driver = tokio::spawn(connection);
                drop(client.batch_execute(&format!("drop database if exists {name} with (force)")).await);
                driver.abort();
            });
        }
    });
    send
});

async fn prepare_template(maintenance: &str, template: &str) {
    let client = connect(maintenance).await;
    client
        .batch_execute(&format!("create database {TEMPLATE} template template0"))
        .await
        .expect("create the template");
    migrate(template).await;
    // Closed to everybody, so that no copy ever fails with "source database is being accessed by other users".
    client
        .batch_execute(&format!("alter database {TEMPLATE} with is_template true allow_connections false"))
        .await
        .expect("close the template");
    let leave = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1";
    client.query(leave, &[&TEMPLATE]).await.expect("end the sessions that filled the template");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}
