//! What an operator sees: members, what they lease, and how deep the queues are.

use serde::Serialize;
use uuid::Uuid;

use crate::connect::{check_schema, connect};
use crate::error::Error;
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::status as statement;

/// The state of a pump's tables at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// The schema.
    pub schema: String,
    /// The members.
    pub instances: Vec<InstanceStatus>,
    /// The four categories.
    pub categories: Vec<CategoryStatus>,
}

/// One member.
#[derive(Debug, Clone, Serialize)]
pub struct InstanceStatus {
    /// Its id.
    pub instance_id: Uuid,
    /// The service it is embedded in.
    pub service_name: String,
    /// Its host.
    pub host_name: String,
    /// Its process.
    pub process_id: i32,
    /// Seconds since its last heartbeat, by the database clock.
    pub heartbeat_age_seconds: f64,
    /// The interval it declared.
    pub heartbeat_interval_seconds: Option<i32>,
    /// Whether its last heartbeat declared the alive-lock.
    pub lock_declared: bool,
    /// Whether work may be routed to it.
    pub accepts_work: bool,
    /// The categories it runs, and so is rung for; `None`: it did not say, and is taken to run all.
    pub categories: Option<Vec<String>>,
    /// The state of its notify gate, as its last heartbeat reported it: `available`, `unavailable`, `unconfigured`, or `unknown`.
    pub gate: String,
    /// Why its gate is not available.
    pub gate_reason: Option<String>,
    /// Whether it counts as alive, by the rule that evictions use.
    pub alive: bool,
    /// Rows it leases.
    pub leases: i64,
}

/// One category.
#[derive(Debug, Clone, Serialize)]
pub struct CategoryStatus {
    /// Its name.
    pub category: String,
    /// Rows that may be claimed now (those behind a blocked head of their stream included).
    pub ready: i64,
    /// Rows under a live lease.
    pub leased: i64,
    /// Rows that wait for their time.
    pub scheduled: i64,
    /// Rows whose time has come and that the next claim takes up: due schedules and expired leases.
    pub due: i64,
    /// Rows given up and not replayed.
    pub dead_letters: i64,
    /// Seconds since the oldest unfinished row was stored.
    pub oldest_age_seconds: Option<f64>,
}

impl CategoryStatus {
    /// Unfinished rows.
    pub fn depth(&self) -> i64 {
        self.ready + self.leased + self.scheduled + self.due
    }
}

/// Reads the state of the pump's tables in `schema`.
pub async fn status(url: &str, schema: &str) -> Result<Status, Error> {
    let name = SchemaName::new(schema)?;
    let client = connect(url).await?;
    check_schema(&client, schema).await?;
    let read = async {
        let instances = client.query_typed(&statement::instances(&name), &[]).await?;
        let categories = client.query_typed(&statement::categories(&name), &[]).await?;
        let instances = instances.iter().map(instance).collect::<Result<_, _>>()?;
        let categories = categories.iter().map(category).collect::<Result<_, _>>()?;
        Ok::<_, tokio_postgres::Error>(Status { schema: schema.to_owned(), instances, categories })
    };
    read.await.map_err(|error| Error::database(&error))
}

fn instance(row: &tokio_postgres::Row) -> Result<InstanceStatus, tokio_postgres::Error> {
    Ok(InstanceStatus {
        instance_id: row.try_get(0)?,
        service_name: row.try_get(1)?,
        host_name: row.try_get(2)?,
        process_id: row.try_get(3)?,
        heartbeat_age_seconds: row.try_get(4)?,
        heartbeat_interval_seconds: row.try_get(5)?,
        lock_declared: row.try_get(6)?,
        accepts_work: row.try_get(7)?,
        gate: row.try_get(8)?,
        alive: row.try_get(9)?,
        leases: row.try_get(10)?,
        gate_reason: row.try_get(11)?,
        categories: row.try_get(12)?,
    })
}

fn category(row: &tokio_postgres::Row) -> Result<CategoryStatus, tokio_postgres::Error> {
    Ok(CategoryStatus {
        category: row.try_get(0)?,
        ready: row.try_get(1)?,
        leased: row.try_get(2)?,
        scheduled: row.try_get(3)?,
        due: row.try_get(4)?,
        dead_letters: row.try_get(5)?,
        oldest_age_seconds: row.try_get(6)?,
    })
}

/// An instance that others evicted.
#[derive(Debug, Clone, Serialize)]
pub struct Eviction {
    /// Who is a member no longer, and never will be under this id.
    pub instance_id: Uuid,
    /// Who did it; none when it was done by hand.
    pub evicted_by: Option<Uuid>,
    /// Why.
    pub reason: String,
    /// Seconds since, by the database clock.
    pub age_seconds: f64,
    /// Whether everything it held came back.
    pub released: bool,
}

/// The evictions on record in `schema`, the latest first. Instances that left by themselves are not among them.
pub async fn evictions(url: &str, schema: &str) -> Result<Vec<Eviction>, Error> {
    let name = SchemaName::new(schema)?;
    let client = connect(url).await?;
    check_schema(&client, schema).await?;
    let read = async {
        let rows = client.query_typed(&statement::evictions(&name), &[]).await?;
        let evictions = rows.iter().map(|row| {
            Ok(Eviction {
                instance_id: row.try_get(0)?,
                evicted_by: row.try_get(1)?,
                reason: row.try_get(2)?,
                age_seconds: row.try_get(3)?,
                released: row.try_get(4)?,
            })
        });
        evictions.collect::<Result<_, tokio_postgres::Error>>()
    };
    read.await.map_err(|error| Error::database(&error))
}
