//! The session that claims, and sleeps: claims and the arm lock have one, so that they end together.
//!
//! The rule: it is taken out for a call and only put back after the answer, so a call whose caller has gone, or whose time is up, ends
//! the session and everything it holds. The failures this prevents: a claim that waits behind a statement of an earlier caller, and an
//! arm lock of which nobody knows any more, held by a session that goes on.
//!
//! Where the direct URL cannot be opened, claims go through the database URL for a while: they need no session state. Such a session is
//! never armed. The failure this prevents: a firewall rule on one address that stops all work while the database is well.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_postgres::Config;
use tokio_postgres::types::Type;
use tracing::warn;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{ArmMode, Armed, StoreError};

use super::fault::{open_error, store_error};
use super::kept_session::SECOND_BEST_FOR;
use super::pool::late;
use super::schema_name::SchemaName;
use super::session::{CALL_DEADLINE, OPEN_DEADLINE, OpenError, Session};
use super::statement::work as statement;

struct Texts {
    arm: String,
    set_full: String,
    disarm: String,
}

/// The session of claims, opened when it is first needed.
pub(crate) struct ClaimSession {
    direct: Config,
    second_best: Option<Config>,
    io: Handle,
    texts: Texts,
    slot: Mutex<Option<Held>>,
}

/// The session, and what it holds.
struct Held {
    session: Session,
    armed: Option<(InstanceId, ArmMode)>,
    leads: Leads,
}

/// Where a session leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leads {
    /// It was not asked yet.
    Somewhere,
    /// To this backend of the server, and no other.
    ToBackend(i32),
    /// Through a pooler.
    Through,
    /// Along the database URL, because the direct one could not be opened; until then.
    SecondBest(Instant),
}

/// What came of arming.
enum Answer {
    Armed(Armed),
    /// A producer is at work that found the lock free.
    InVain,
    /// The session leads through a pooler, and holds nothing.
    NotDirect,
    /// The direct URL cannot be opened.
    Unreachable,
}

impl ClaimSession {
    /// Opens nothing yet. When `direct` cannot be opened, `pooled` will do for a while.
    pub(crate) fn new(schema: &SchemaName, direct: Config, pooled: &Config, io: Handle) -> Self {
        let texts = Texts {
            arm: statement::arm(schema),
            set_full: statement::set_full(schema),
            disarm: statement::disarm(schema),
        };
        let second_best = (*pooled != direct).then(|| pooled.clone());
        Self { direct, second_best, io, texts, slot: Mutex::new(None) }
    }

    /// One call on the session; it is opened if need be.
    pub(crate) async fn call<T>(
        &self,
        instance: InstanceId,
        what: &str,
        call: impl AsyncFnOnce(&Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        self.hold(instance, what, false, async |held| call(&held.session).await).await
    }

    async fn hold<T>(
        &self,
        instance: InstanceId,
        what: &str,
        to_arm: bool,
        call: impl AsyncFnOnce(&mut Held) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let mut slot = self.slot.lock().await;
        // Somebody hears notifications again, so the direct URL may be open again.
        let fit = slot.take().filter(|held| held.is_fit(instance) && !(to_arm && held.is_second_best()));
        let mut held = match fit {
            Some(held) => held,
            None => self.open(instance).await?,
        };
        let answer = timeout(CALL_DEADLINE, call(&mut held)).await.map_err(|_| late(what))?;
        *slot = Some(held);
        answer.map_err(|error| store_error(&error, instance))
    }

    async fn open(&self, instance: InstanceId) -> Result<Held, StoreError> {
        let (direct, second_best) = (self.direct.clone(), self.second_best.clone());
        let opened = self.io.spawn(async move {
            let Some(second_best) = second_best else {
                return Ok::<_, OpenError>((Session::open_marked(&direct).await?, Leads::Somewhere));
            };
            // Half of the time: a claim waits for it.
            let opening = timeout(OPEN_DEADLINE / 2, Session::open_marked(&direct));
            match opening.await.unwrap_or(Err(OpenError::Late)) {
                Ok(session) => Ok((session, Leads::Somewhere)),
                Err(error) => {
                    let session = Session::open(&second_best).await?;
                    warn!(%error, "no session on the direct URL, claiming through the database URL for a minute");
                    Ok((session, Leads::SecondBest(Instant::now() + SECOND_BEST_FOR)))
                }
            }
        });
        let (session, leads) = opened
            .await
            .map_err(|_| StoreError::Unavailable("the pump's connections are shut down".to_owned()))?
            .map_err(|error| open_error(&error, instance))?;
        Ok(Held { session, armed: None, leads })
    }

    /// Takes the arm lock, unless the session has it already.
    pub(crate) async fn arm(
        &self,
        instance: InstanceId,
        wait: Duration,
        mode: ArmMode,
    ) -> Result<Option<Armed>, StoreError> {
        let armed = self
            .hold(instance, "arm lock", true, async |held| held.arm(&self.texts, instance, wait, mode).await);
        match armed.await? {
            Answer::Armed(armed) => Ok(Some(armed)),
            Answer::InVain => Ok(None),
            Answer::NotDirect => Err(open_error(&not_direct(), instance)),
            Answer::Unreachable => Err(StoreError::Unavailable(
                "the direct URL cannot be opened, nothing can be armed".to_owned(),
            )),
        }
    }

    /// Gives the arm lock back. Asks the database nothing when the session does not hold it.
    pub(crate) async fn disarm(&self, instance: InstanceId) -> Result<(), StoreError> {
        if self.slot.lock().await.as_ref().is_none_or(|held| held.armed.is_none()) {
            return Ok(());
        }
        self.hold(instance, "end of the arm lock", false, async |held| {
            if let Some((_, mode)) = held.armed {
                let params = [(&instance.0 as _, Type::UUID), (&(mode == ArmMode::Full) as _, Type::BOOL)];
                held.session.client.query_typed_one(&self.texts.disarm, &params).await?;
                held.armed = None;
            }
            Ok(())
        })
        .await
    }
}

impl Held {
    /// Whether it serves this instance: what an earlier life has armed ends with its session.
    fn is_fit(&self, instance: InstanceId) -> bool {
        let served = matches!(self.leads, Leads::SecondBest(until) if until <= Instant::now());
        !served && !self.session.client.is_closed() && self.armed.is_none_or(|(whose, _)| whose == instance)
    }

    fn is_second_best(&self) -> bool {
        matches!(self.leads, Leads::SecondBest(_))
    }

    async fn arm(
        &mut self,
        texts: &Texts,
        instance: InstanceId,
        wait: Duration,
        mode: ArmMode,
    ) -> Result<Answer, tokio_postgres::Error> {
        if self.is_second_best() {
            return Ok(Answer::Unreachable);
        }
        if self.leads == Leads::Somewhere {
            self.leads = self.session.backend().await?.map_or(Leads::Through, Leads::ToBackend);
        }
        let Leads::ToBackend(backend) = self.leads else { return Ok(Answer::NotDirect) };
        let full = mode == ArmMode::Full;
        let armed = match self.armed {
            Some((_, held)) if held == mode => true,
            Some(_) => {
                let params = [(&instance.0 as _, Type::UUID), (&full as _, Type::BOOL)];
                self.session.client.query_typed_one(&texts.set_full, &params).await?.try_get(0)?
            }
            None => {
                let wait = wait.as_millis().clamp(1, i32::MAX as u128) as i32;
                let params =
                    [(&instance.0 as _, Type::UUID), (&wait as _, Type::INT4), (&full as _, Type::BOOL)];
                let row = self.session.client.query_typed_one(&texts.arm, &params).await?;
                if row.try_get::<_, i32>(1)? != backend {
                    self.leads = Leads::Through;
                    return Ok(Answer::NotDirect);
                }
                row.try_get(0)?
            }
        };
        if !armed {
            return Ok(Answer::InVain);
        }
        self.armed = Some((instance, mode));
        Ok(Answer::Armed(Armed::until(self.session.ended())))
    }
}

fn not_direct() -> OpenError {
    OpenError::NotDirect("claims go through a pooler, whose sessions can hold no arm lock".to_owned())
}
