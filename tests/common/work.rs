//! What the SQL tests of claiming share: the four categories, and short ways to store, claim, settle and look.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of these helpers")]

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Error, NoTls, Row};
use uuid::Uuid;

use crate::common::typed::{Parameter, typed};
use crate::common::{self, Database};

/// One of the four work tables.
#[derive(Debug)]
pub struct Kind {
    pub category: &'static str,
    pub suffix: &'static str,
    pub table: &'static str,
    pub key: &'static str,
    pub done: &'static str,
    /// The second column of the order key.
    pub lane: Option<&'static str>,
    /// Whether a row may have no stream.
    pub unordered: bool,
    insert: &'static str,
}

pub static OUTBOX: Kind = Kind {
    category: "outbox",
    suffix: "outbox",
    table: "wh_outbox",
    key: "message_id",
    done: "processed_at",
    lane: None,
    unordered: true,
    insert: "insert into wh_outbox (message_id, stream_id, destination, message_type, payload) values ($1, $2, $3, 'm', '{}')",
};
pub static INBOX: Kind = Kind {
    category: "inbox",
    suffix: "inbox",
    table: "wh_inbox",
    key: "message_id",
    done: "processed_at",
    lane: None,
    unordered: true,
    insert: "insert into wh_inbox (message_id, stream_id, handler_name, message_type, payload) values ($1, $2, $3, 'm', '{}')",
};
pub static PERSPECTIVE: Kind = Kind {
    category: "perspective_event",
    suffix: "perspective_events",
    table: "wh_perspective_events",
    key: "event_work_id",
    done: "processed_at",
    lane: Some("perspective_name"),
    unordered: false,
    insert: "insert into wh_perspective_events (event_work_id, stream_id, perspective_name, event_id) values ($1, $2, $3, gen_random_uuid())",
};
pub static RECEPTOR: Kind = Kind {
    category: "receptor",
    suffix: "receptor_work",
    table: "wh_receptor_processing",
    key: "id",
    done: "completed_at",
    lane: Some("receptor_name"),
    unordered: true,
    insert: "insert into wh_receptor_processing (id, stream_id, receptor_name, event_id) values ($1, $2, $3, gen_random_uuid())",
};
/// All four, in the order in which everything takes its locks.
pub static KINDS: [&Kind; 4] = [&OUTBOX, &INBOX, &PERSPECTIVE, &RECEPTOR];

impl Kind {
    /// Another one of the four.
    pub fn named(category: &str) -> &'static Kind {
        KINDS.into_iter().find(|kind| kind.category == category).expect("a known category")
    }
}

/// A database of a test.
pub struct Lab {
    pub db: Database,
}

impl Lab {
    pub async fn new() -> (Self, Session) {
        let lab = Self { db: common::database().await };
        let session = lab.session().await;
        (lab, session)
    }

    pub async fn session(&self) -> Session {
        session(self.db.url()).await
    }

    /// Past any pooler, for settings that have to hold for one session alone.
    pub async fn direct_session(&self) -> Session {
        session(self.db.direct_url()).await
    }
}

/// A connection that keeps the notices it gets.
pub struct Session {
    client: Client,
    notices: Arc<Mutex<Vec<String>>>,
}

impl Deref for Session {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

pub async fn session(url: &str) -> Session {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection");
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notice(notice) = message {
                heard.lock().unwrap_or_else(PoisonError::into_inner).push(notice.message().to_owned());
            }
        }
    });
    Session { client, notices }
}

/// What to claim; the defaults are those of the function.
#[derive(Clone, Debug)]
pub struct Claim {
    pub me: Uuid,
    pub rows: i32,
    pub seconds: i32,
    pub partitions: i32,
    pub categories: Option<Vec<String>>,
    pub run: i32,
    pub bytes: i64,
}

impl Claim {
    pub fn of(me: Uuid) -> Self {
        Self { me, rows: 1000, seconds: 300, partitions: 10_000, categories: None, run: 100, bytes: 16 << 20 }
    }
    pub fn rows(mut self, rows: i32) -> Self {
        self.rows = rows;
        self
    }
    pub fn seconds(mut self, seconds: i32) -> Self {
        self.seconds = seconds;
        self
    }
    pub fn run(mut self, run: i32) -> Self {
        self.run = run;
        self
    }
    pub fn bytes(mut self, bytes: i64) -> Self {
        self.bytes = bytes;
        self
    }
    pub fn only(mut self, kind: &Kind) -> Self {
        self.categories = Some(vec![kind.category.to_owned()]);
        self
    }
}

/// A row that a claim returned.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub category: String,
    pub id: Uuid,
    pub stream: Option<Uuid>,
    pub partition: Option<i32>,
    pub epoch: i64,
    pub attempts: i32,
    pub crashes: i32,
    pub expiry: SystemTime,
    pub seq: i64,
    pub name: Option<String>,
}

impl Claimed {
    pub fn from_row(row: &Row) -> Self {
        Self {
            category: row.get("category"),
            id: row.get("work_id"),
            stream: row.get("stream_id"),
            partition: row.get("partition_number"),
            epoch: row.get("claim_epoch"),
            attempts: row.get("attempts"),
            crashes: row.get("crash_count"),
            expiry: row.get("lease_expiry"),
            seq: row.get("seq"),
            name: row.get("name"),
        }
    }
}

pub fn ids(rows: &[Claimed]) -> Vec<Uuid> {
    rows.iter().map(|row| row.id).collect()
}

/// A row as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub instance: Option<Uuid>,
    pub expiry: Option<SystemTime>,
    pub epoch: i64,
    pub attempts: i32,
    pub crashes: i32,
    pub scheduled: Option<SystemTime>,
    pub reason: Option<i32>,
    pub error: Option<String>,
    pub done: bool,
}

/// One entry of a settlement.
#[derive(Clone, Debug)]
pub struct Item {
    pub category: String,
    pub id: Uuid,
    pub epoch: i64,
    pub verdict: &'static str,
    pub after: Option<i64>,
    pub reason: Option<i32>,
    pub error: Option<String>,
}

pub fn verdict(row: &Claimed, verdict: &'static str) -> Item {
    Item {
        category: row.category.clone(),
        id: row.id,
        epoch: row.epoch,
        verdict,
        after: None,
        reason: None,
        error: None,
    }
}

/// The driver's methods, without the named statements that they leave behind.
impl Session {
    pub async fn query(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        self.client.query_typed(sql, &typed(parameters)).await
    }

    pub async fn query_one(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<Row, Error> {
        self.client.query_typed_one(sql, &typed(parameters)).await
    }

    pub async fn query_opt(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<Option<Row>, Error> {
        self.client.query_typed_opt(sql, &typed(parameters)).await
    }

    pub async fn execute(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<u64, Error> {
        self.client.execute_typed(sql, &typed(parameters)).await
    }
}

impl Session {
    /// Registers a new instance.
    pub async fn member(&self) -> Uuid {
        let id = Uuid::now_v7();
        self.join(id).await;
        id
    }

    pub async fn join(&self, id: Uuid) {
        let sql = "insert into wh_service_instances (instance_id, service_name, host_name, process_id) values ($1, 's', 'h', 1)";
        self.execute(sql, &[&id]).await.expect("a new member");
    }

    /// Stores one row and returns its id; the lane is `a` where the category has lanes.
    pub async fn store(&self, kind: &Kind, stream: impl Into<Option<Uuid>>) -> Uuid {
        self.store_in(kind, stream, "a").await
    }

    pub async fn store_in(&self, kind: &Kind, stream: impl Into<Option<Uuid>>, lane: &str) -> Uuid {
        let id = Uuid::now_v7();
        self.execute(kind.insert, &[&id, &stream.into(), &lane]).await.expect("a stored row");
        id
    }

    pub async fn store_many(&self, kind: &Kind, stream: impl Into<Option<Uuid>>, count: usize) -> Vec<Uuid> {
        let stream = stream.into();
        let mut stored = Vec::new();
        for _ in 0..count {
            stored.push(self.store(kind, stream).await);
        }
        stored
    }

    pub async fn try_claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let Claim { me, rows, seconds, partitions, categories, run, bytes } = claim;
        let arguments: [&(dyn ToSql + Sync); 7] = [me, rows, seconds, partitions, categories, run, bytes];
        let rows = self.query("select * from claim_work($1, $2, $3, $4, $5, $6, $7)", &arguments).await?;
        Ok(rows.iter().map(Claimed::from_row).collect())
    }

    pub async fn claim(&self, claim: &Claim) -> Vec<Claimed> {
        self.try_claim(claim).await.expect("a claim")
    }

    pub async fn try_settle(
        &self,
        me: Uuid,
        items: &[Item],
        keep: bool,
    ) -> Result<Vec<(String, Uuid)>, Error> {
        let categories: Vec<_> = items.iter().map(|i| i.category.as_str()).collect();
        let ids: Vec<_> = items.iter().map(|i| i.id).collect();
        let epochs: Vec<_> = items.iter().map(|i| i.epoch).collect();
        let verdicts: Vec<_> = items.iter().map(|i| i.verdict).collect();
        let after: Vec<_> = items.iter().map(|i| i.after).collect();
        let reasons: Vec<_> = items.iter().map(|i| i.reason).collect();
        let errors: Vec<_> = items.iter().map(|i| i.error.as_deref()).collect();
        let arguments: [&(dyn ToSql + Sync); 9] =
            [&me, &categories, &ids, &epochs, &verdicts, &after, &reasons, &errors, &keep];
        let sql = "select category, work_id from settle_work($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let fenced = self.query(sql, &arguments).await?;
        Ok(fenced.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// The rows that were fenced.
    pub async fn settle(&self, me: Uuid, items: &[Item]) -> Vec<Uuid> {
        let fenced = self.try_settle(me, items, false).await.expect("a settlement");
        fenced.into_iter().map(|(_, id)| id).collect()
    }

    /// Completes what a claim returned.
    pub async fn complete(&self, me: Uuid, rows: &[Claimed]) -> Vec<Uuid> {
        let items: Vec<_> = rows.iter().map(|row| verdict(row, "complete")).collect();
        self.settle(me, &items).await
    }

    pub async fn state(&self, kind: &Kind, id: Uuid) -> Option<State> {
        let sql = format!(
            "select instance_id, lease_expiry, claim_epoch, attempts, crash_count, scheduled_for, failure_reason, error,
                    {} is not null as done from {} where {} = $1",
            kind.done, kind.table, kind.key
        );
        self.query_opt(&sql, &[&id]).await.expect("a look").map(|row| State {
            instance: row.get(0),
            expiry: row.get(1),
            epoch: row.get(2),
            attempts: row.get(3),
            crashes: row.get(4),
            scheduled: row.get(5),
            reason: row.get(6),
            error: row.get(7),
            done: row.get(8),
        })
    }

    /// Lets the leases of all rows run out, as time would.
    pub async fn let_leases_run_out(&self, kind: &Kind) {
        let sql = format!(
            "update {} set lease_expiry = clock_timestamp() - interval '1 second' where instance_id is not null",
            kind.table
        );
        self.batch_execute(&sql).await.expect("expired leases");
    }

    /// Parks a row: not due before this many seconds have passed.
    pub async fn park(&self, kind: &Kind, id: Uuid, seconds: f64) {
        let sql = format!(
            "update {} set scheduled_for = clock_timestamp() + make_interval(secs => $2) where {} = $1",
            kind.table, kind.key
        );
        self.execute(&sql, &[&id, &seconds]).await.expect("a parked row");
    }

    /// The database's time.
    pub async fn now(&self) -> SystemTime {
        self.query_one("select clock_timestamp()", &[]).await.expect("the time").get(0)
    }

    /// The notices since the last look.
    pub fn notices(&self) -> Vec<String> {
        std::mem::take(&mut *self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the last claim said that there is more.
    pub fn has_more(&self) -> bool {
        self.notices().iter().any(|notice| notice == "whizbang.has_more=true")
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.query_one(sql, &[]).await.expect("a number").get(0)
    }

    /// Makes an instance a tombstone, as an eviction does.
    pub async fn evict(&self, id: Uuid) {
        self.execute("delete from wh_service_instances where instance_id = $1", &[&id]).await.expect("evict");
        let sql = "insert into wh_instance_evictions (instance_id, reason) values ($1, 'test')";
        self.execute(sql, &[&id]).await.expect("a tombstone");
    }
}

/// The SQLSTATE and the hint of an error.
pub fn refusal(error: &Error) -> (String, Option<String>) {
    let db = error.as_db_error().unwrap_or_else(|| panic!("an answer of the database, not {error:?}"));
    (db.code().code().to_owned(), db.hint().map(str::to_owned))
}

pub fn millis(since: tokio::time::Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// A uuid that only depends on a number and falls anywhere, so that a replay meets the same streams.
pub fn scattered(number: u64) -> Uuid {
    Uuid::new_v5(&Uuid::nil(), &number.to_le_bytes())
}
