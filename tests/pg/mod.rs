//! The engine's ports on a real server, seen from inside: `src/pg/mod.rs` loads this room, because nothing in it is public.

mod arm;
mod beat;
#[cfg(target_os = "linux")]
mod cut;
mod direct;
mod limits;
mod renew;
mod route;
mod sweep;
mod watch;
#[path = "../common/work.rs"]
mod work;

use tokio_postgres::{Client, Config};
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{DirectConnector, DirectSession, NotificationStream, StoreError};

use crate::pg::direct_session::PgDirectConnector;
use crate::pg::schema_name::SchemaName;

/// The schema of the fixtures.
fn schema() -> SchemaName {
    SchemaName::new("public").expect("a schema name")
}

/// A configuration as the builder makes one.
fn config(url: &str) -> Config {
    crate::connect::parse("database", url).expect("a URL")
}

/// A direct session through the port, driven by the test's runtime.
async fn connect(url: &str) -> Result<(Box<dyn DirectSession>, NotificationStream), StoreError> {
    let io = tokio::runtime::Handle::current();
    PgDirectConnector::new(&schema(), config(url), io).connect().await
}

/// A boolean, a number or a text.
async fn value<T: tokio_postgres::types::FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// One beat, which declares the lock or not.
async fn beat(client: &Client, instance: InstanceId, lock: bool) {
    let sql = format!("select record_heartbeat('{instance}', 's', 'h', 1, null, 60, {lock})");
    assert!(value::<bool>(client, &sql).await);
}

/// Ends every session of this application in this database but the asking one; how many.
async fn kill_sessions(client: &Client) -> i64 {
    value(
        client,
        "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity \
         where datname = current_database() and application_name = 'workpump' and pid <> pg_backend_pid()",
    )
    .await
}

/// The nth instance of a test; small numbers come first in the ring.
fn instance(n: u128) -> InstanceId {
    InstanceId(Uuid::from_u128(0x018f_0000_0000_7000_8000_0000_0000_0000 + n))
}
