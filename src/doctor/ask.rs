//! Asking a database that may be sick.
//!
//! The rule: every question has a limit at the server and a longer one here, all of them together end within [`TOTAL`], and a question
//! without an answer is a value that the next check does not care about. The failure this prevents: a doctor that hangs on the patient.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row};
use workpump_actors::port::NotificationSender;

use crate::pg::direct::DirectClient;
use crate::pg::fault::describe;
use crate::pg::session::{OpenError, Session};
use crate::pg::statement::doctor as sql;

/// The limit for everything.
pub(super) const TOTAL: Duration = Duration::from_secs(15);
/// The server's limit for one statement.
const STATEMENT: Duration = Duration::from_secs(3);
/// How much longer an answer is waited for: the server gives up first.
const ON_THE_WAY: Duration = Duration::from_secs(1);
/// The limit for opening a session, login included.
const OPEN: Duration = Duration::from_secs(4);

/// Why there is no answer, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoAnswer(String);

impl NoAnswer {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }

    fn from_server(error: &tokio_postgres::Error) -> Self {
        Self(describe(error))
    }
}

/// The instant at which the doctor leaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visit {
    until: Instant,
}

impl Visit {
    pub(super) fn begin() -> Self {
        Self { until: Instant::now() + TOTAL }
    }

    /// `wanted`, or what is left.
    pub(super) fn at_most(self, wanted: Duration) -> Duration {
        wanted.min(self.until.saturating_duration_since(Instant::now()))
    }
}

/// The other end of an address.
enum Link {
    /// The server itself.
    Direct(DirectClient),
    /// Somebody in between.
    Pooled(Session),
}

/// A session, and how it was reached.
pub(super) struct Patient {
    link: Link,
    /// Why it is not the server itself, if it is not.
    pub(super) pooled_because: Option<String>,
    visit: Visit,
    /// It owes an answer, so nothing more is asked of it.
    silent: Cell<bool>,
}

impl Patient {
    /// Opens a session: directly if that can be, else through whoever is in between.
    pub(super) async fn open(
        config: &Config,
        heard: Option<NotificationSender>,
        visit: Visit,
    ) -> Result<Self, NoAnswer> {
        let late = || NoAnswer(format!("no answer to the login within {} s", OPEN.as_secs()));
        let with = |link, pooled_because| Self { link, pooled_because, visit, silent: Cell::new(false) };
        let opening = DirectClient::open(config, Some(STATEMENT), heard);
        match timeout(visit.at_most(OPEN), opening).await.map_err(|_| late())? {
            Ok(direct) => Ok(with(Link::Direct(direct), None)),
            Err(OpenError::NotDirect(why)) => {
                let session = timeout(visit.at_most(OPEN), Session::open_with(config, STATEMENT)).await;
                let session = session.map_err(|_| late())?.map_err(|error| NoAnswer(error.to_string()))?;
                Ok(with(Link::Pooled(session), Some(why)))
            }
            Err(error) => Err(NoAnswer(error.to_string())),
        }
    }

    /// The bare session, for what is no single question.
    pub(super) fn client(&self) -> &Client {
        match &self.link {
            Link::Direct(direct) => direct.client(),
            Link::Pooled(session) => &session.client,
        }
    }

    /// Waits for something of the session's, within the limits.
    pub(super) async fn within<T>(
        &self,
        limit: Duration,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, NoAnswer> {
        if self.silent.get() {
            return Err(NoAnswer::new("the session still owes an earlier answer"));
        }
        let limit = self.visit.at_most(limit);
        if limit.is_zero() {
            return Err(NoAnswer(format!("the {} s of this examination are over", TOTAL.as_secs())));
        }
        let Ok(answer) = timeout(limit, answer).await else {
            self.silent.set(true);
            // The statement must not outlive its question. Nobody waits for the answer to this.
            let cancel = self.client().cancel_token();
            let _ = timeout(ON_THE_WAY, cancel.cancel_query(NoTls)).await;
            return Err(NoAnswer(format!("no answer within {:.1} s", limit.as_secs_f64())));
        };
        answer.map_err(|error| NoAnswer::from_server(&error))
    }

    /// One question, in a read-only transaction of its own with the server's limits.
    pub(super) async fn rows(
        &self,
        text: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, NoAnswer> {
        let server = self.visit.at_most(STATEMENT).as_millis().max(1);
        let client = self.client();
        let begin = sql::begin(server);
        self.within(STATEMENT + ON_THE_WAY, async {
            client.batch_execute(&begin).await?;
            let rows = client.query_typed(text, params).await;
            client.batch_execute(sql::END).await?;
            rows
        })
        .await
    }

    /// One question with one row for an answer.
    pub(super) async fn row(
        &self,
        text: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Row, NoAnswer> {
        let rows = self.rows(text, params).await?;
        rows.into_iter().next().ok_or_else(|| NoAnswer::new("the server answered with no row"))
    }
}

/// A column's value.
pub(super) fn value<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: usize,
) -> Result<T, NoAnswer> {
    row.try_get(column).map_err(|error| NoAnswer::from_server(&error))
}
