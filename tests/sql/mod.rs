//! Helpers of the tests that call the schema's functions directly.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use futures_util::stream::poll_fn;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc;
use tokio_postgres::types::FromSqlOwned;
use tokio_postgres::{AsyncMessage, Client, NoTls};
use uuid::Uuid;

use crate::common::wait::eventually;

/// The nth instance of a test; small numbers sort first.
pub fn instance(n: u128) -> Uuid {
    Uuid::from_u128(0x018f_0000_0000_7000_8000_0000_0000_0000 + n)
}

/// The nth stream of a test.
pub fn stream(n: u128) -> Uuid {
    Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + n)
}

/// One value.
pub async fn value<T: FromSqlOwned>(client: &Client, sql: &str) -> T {
    client.query_typed_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

/// One column.
pub async fn column<T: FromSqlOwned>(client: &Client, sql: &str) -> Vec<T> {
    let rows = client.query_typed(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    rows.iter().map(|row| row.get(0)).collect()
}

/// Statements without results.
pub async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

/// The SQLSTATE, message and hint of a statement that must fail.
pub async fn refused(client: &Client, sql: &str) -> (String, String, String) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    (error.code().code().to_owned(), error.message().to_owned(), error.hint().unwrap_or_default().to_owned())
}

/// A member whose last beat is `age` seconds old and declared nothing.
pub async fn member(client: &Client, id: Uuid, age: u32) {
    run(client, &format!(
        "insert into wh_service_instances (instance_id, service_name, host_name, process_id, last_heartbeat_at) \
         values ('{id}', 's', 'h', 1, clock_timestamp() - interval '{age} s')"
    )).await;
}

/// A beat of `id` with defaults.
pub async fn beat(client: &Client, id: Uuid) -> bool {
    value(client, &format!("select record_heartbeat('{id}', 's', 'h', 1)")).await
}

/// Whether `id` is a member.
pub async fn is_member(client: &Client, id: Uuid) -> bool {
    value(client, &format!("select exists (select 1 from wh_service_instances where instance_id = '{id}')"))
        .await
}

/// Returns once `sql`, a boolean, is true: a look at the state of another session, which sends no event.
pub async fn until(client: &Client, sql: &str) {
    eventually(sql, async || value(client, sql).await).await;
}

/// The backend of a session.
pub async fn pid(client: &Client) -> i32 {
    value(client, "select pg_backend_pid()").await
}

/// Returns once the session `pid` waits for a lock.
pub async fn until_waiting(client: &Client, pid: i32) {
    until(client, &format!("select coalesce((select wait_event_type = 'Lock' from pg_stat_activity where pid = {pid}), false)")).await;
}

/// A session that listens, and what it has heard.
pub struct Listener {
    /// The session.
    pub client: Client,
    heard: mpsc::UnboundedReceiver<(String, String)>,
}

impl Listener {
    /// Listens on the work channel of each instance. `url` leads to the server itself: behind a pooler nothing is heard.
    pub async fn for_instances(url: &str, ids: &[Uuid]) -> Self {
        let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
        let (send, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut messages = poll_fn(move |cx| connection.poll_message(cx));
            while let Some(Ok(message)) = messages.next().await {
                if let AsyncMessage::Notification(note) = message {
                    let _ = send.send((note.channel().to_owned(), note.payload().to_owned()));
                }
            }
        });
        for id in ids {
            let channel: String = value(&client, &format!("select wh_work_channel('{id}')")).await;
            run(&client, &format!("listen \"{channel}\"")).await;
        }
        run(&client, "listen marker").await;
        Self { client, heard }
    }

    /// Everything rung by transactions that committed before this call, as (last digits of the instance, payload), sorted. Notifications arrive in the order
    /// of commits, so a marker sent now comes after them.
    pub async fn rung(&mut self) -> Vec<(u32, String)> {
        run(&self.client, "notify marker").await;
        let mut rings = Vec::new();
        loop {
            let (channel, payload) = self.heard.recv().await.expect("the listening session lives");
            if channel == "marker" {
                rings.sort();
                return rings;
            }
            let digits = u32::from_str_radix(&channel[channel.len() - 4..], 16)
                .expect("a channel ends with an instance id");
            rings.push((digits, payload));
        }
    }

    /// The next ring, whenever it comes.
    pub async fn next(&mut self) -> (String, String) {
        self.heard.recv().await.expect("the listening session lives")
    }

    /// Whether nothing is waiting to be heard.
    pub fn is_quiet(&mut self) -> bool {
        self.heard.recv().now_or_never().is_none()
    }
}

/// What `rung` returns, spelled shortly.
pub fn rings(expected: &[(u32, &str)]) -> Vec<(u32, String)> {
    expected.iter().map(|(id, payload)| (*id, (*payload).to_owned())).collect()
}
