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
    /// The server itself, proved.
    Direct(DirectClient),
    /// Whoever answers.
    Usual(Session),
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
    /// A session as the pump's usual ones are, and whether it leads to the server itself.
    pub(super) async fn open(config: &Config, visit: Visit) -> Result<Self, NoAnswer> {
        // Opened to be proved, and closed: it has limits of its own, which would hide what the role or the database sets.
        let pooled_because = match limited(visit, DirectClient::open(config, Some(STATEMENT), None)).await? {
            Ok(_) => None,
            Err(OpenError::NotDirect(why)) => Some(why),
            Err(error) => return Err(NoAnswer(error.to_string())),
        };
        let session = limited(visit, Session::open_with(config, STATEMENT)).await?;
        let link = Link::Usual(session.map_err(|error| NoAnswer(error.to_string()))?);
        Ok(Self { link, pooled_because, visit, silent: Cell::new(false) })
    }

    /// A direct session that listens. The inner error says why the address is no direct one.
    pub(super) async fn listening(
        config: &Config,
        heard: NotificationSender,
        visit: Visit,
    ) -> Result<Result<Self, String>, NoAnswer> {
        match limited(visit, DirectClient::open(config, Some(STATEMENT), Some(heard))).await? {
            Ok(direct) => {
                let link = Link::Direct(direct);
                Ok(Ok(Self { link, pooled_because: None, visit, silent: Cell::new(false) }))
            }
            Err(OpenError::NotDirect(why)) => Ok(Err(why)),
            Err(error) => Err(NoAnswer(error.to_string())),
        }
    }

    /// The bare session, for what is no single question.
    pub(super) fn client(&self) -> &Client {
        match &self.link {
            Link::Direct(direct) => direct.client(),
            Link::Usual(session) => &session.client,
        }
    }

    /// `wanted`, or what is left of the examination.
    pub(super) fn at_most(&self, wanted: Duration) -> Duration {
        self.visit.at_most(wanted)
    }

    /// Waits for an answer of the session's, whatever it is, within the limits.
    pub(super) async fn answer<T>(
        &self,
        limit: Duration,
        answer: impl Future<Output = T>,
    ) -> Result<T, NoAnswer> {
        if self.silent.get() {
            return Err(NoAnswer::new("the session still owes an earlier answer"));
        }
        let limit = self.visit.at_most(limit);
        if limit.is_zero() {
            return Err(NoAnswer(format!("the {} s of this examination are over", TOTAL.as_secs())));
        }
        if let Ok(answer) = timeout(limit, answer).await {
            return Ok(answer);
        }
        self.silent.set(true);
        // The statement must not outlive its question. Nobody waits for the answer to this.
        let cancel = self.client().cancel_token();
        let _ = timeout(ON_THE_WAY, cancel.cancel_query(NoTls)).await;
        Err(NoAnswer(format!("no answer within {:.1} s", limit.as_secs_f64())))
    }

    /// The same for what the driver answers.
    pub(super) async fn within<T>(
        &self,
        limit: Duration,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, NoAnswer> {
        self.answer(limit, answer).await?.map_err(|error| NoAnswer::from_server(&error))
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

/// An opening within its limit.
async fn limited<T>(visit: Visit, opening: impl Future<Output = T>) -> Result<T, NoAnswer> {
    let late = |_| NoAnswer(format!("no answer to the login within {} s", OPEN.as_secs()));
    timeout(visit.at_most(OPEN), opening).await.map_err(late)
}

/// A column's value.
pub(super) fn value<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: usize,
) -> Result<T, NoAnswer> {
    row.try_get(column).map_err(|error| NoAnswer::from_server(&error))
}
