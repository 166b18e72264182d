//! The server of a test binary, and a database of its own for each test.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, OnceLock, mpsc};

use tokio_postgres::{Client, NoTls};
use workpump::embedded::EmbeddedPostgres;

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

/// A server of one test alone, which that test may stop, kill and restart.
pub struct PrivateServer {
    /// The server itself.
    pub postgres: EmbeddedPostgres,
}

/// A server with the given settings, such as `("shared_preload_libraries", "pg_stat_statements")`.
pub fn server_with(settings: &[(&str, &str)]) -> PrivateServer {
    let builder = EmbeddedPostgres::builder().setting("max_prepared_transactions", "20");
    let builder = settings.iter().fold(builder, |builder, (name, value)| builder.setting(name, value));
    let server = PrivateServer { postgres: builder.start().expect("a private PostgreSQL") };
    let (maintenance, template) = (server.postgres.url("postgres"), server.postgres.url(TEMPLATE));
    // A thread and a runtime of its own: the caller may be inside a test's runtime, or in none.
    let prepared = std::thread::spawn(move || runtime().block_on(prepare_template(&maintenance, &template)));
    if let Err(panic) = prepared.join() {
        std::panic::resume_unwind(panic);
    }
    server
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
        Database { url: self.postgres.url(&name), name, maintenance }
    }
}

/// A test's own database. Dropped in the background after the test, whoever is still connected.
pub struct Database {
    name: String,
    url: String,
    maintenance: String,
}

impl Database {
    /// Its address; the user is a superuser.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address for another user, created with `create role … login`; the server trusts every user.
    pub fn url_as(&self, user: &str) -> String {
        self.url.replacen("//postgres@", &format!("//{user}@"), 1)
    }

    /// A connection of the superuser.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
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
