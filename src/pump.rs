//! The pump: build it, start it, wake it, drain it.
//!
//! The rule: what cannot work is refused by [`Builder::start`] with an error that names it, and what has started stops cleanly, in
//! reverse, by [`WorkPump::drain`]. The failure this prevents: a service that looks healthy and moves nothing.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor;
use serde::de::DeserializeOwned;
use tokio_postgres::{Config, Transaction};
use workpump_actors::instance::{InstanceId, InstanceIdentity};
use workpump_actors::message::{Account, GateReport};
use workpump_actors::options::Options;
use workpump_actors::port::{DeathWatch, Doorbell};
use workpump_actors::registry::{Group, Placement, Registry, Spec, StartFailed};
use workpump_actors::runner::Runner;
use workpump_actors::tree::{DrainReport, Engine, EngineParts, StartError};
use workpump_actors::work::Category;

use crate::commit::{CommitError, Enqueued, commit};
use crate::connect::{check_schema, parse};
use crate::enqueue::Producer;
use crate::error::Error;
use crate::handler::{Handler, Handlers, Publisher, PublisherRunner};
use crate::pg::death_watch::PgDeathWatch;
use crate::pg::direct_session::PgDirectConnector;
use crate::pg::instance_store::PgInstanceStore;
use crate::pg::migrate::migrate_on;
use crate::pg::place::Place;
use crate::pg::producers_route::PgProducersRoute;
use crate::pg::renewal_store::PgRenewalStore;
use crate::pg::schema_name::SchemaName;
use crate::pg::session::{OpenError, Session};
use crate::pg::sweep_store::PgSweepStore;
use crate::pg::work_store::PgWorkStore;
use crate::runtime::OwnRuntime;
use crate::signal::{Hub, HubActor, Signals, Topic};

/// How long the first heartbeat may take before the start counts as failed.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// How long the start asks where its two URLs lead to.
const PLACE_DEADLINE: Duration = Duration::from_secs(5);

/// What a pump is made of. Made by [`WorkPump::builder`].
#[must_use = "a builder does nothing until it is started"]
pub struct Builder {
    database_url: String,
    direct_url: Option<String>,
    schema: String,
    service_name: Option<String>,
    options: Options,
    migrate: bool,
    runners: Vec<(Category, Arc<dyn Runner>)>,
    handlers: Handlers,
    users: Group,
    twice: Option<String>,
}

impl std::fmt::Debug for Builder {
    /// Without the URLs: they may hold passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("schema", &self.schema)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Builder {
    /// A second URL that leads to the server itself, past any pooler: heartbeats and claims use it. Default: the database URL.
    pub fn direct_url(mut self, url: impl Into<String>) -> Self {
        self.direct_url = Some(url.into());
        self
    }

    /// The schema of the pump's tables. Default `public`.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// The service's name, as peers and operators see it. Default: the program's.
    pub fn service_name(mut self, name: impl Into<String>) -> Self {
        self.service_name = Some(name.into());
        self
    }

    /// All options. Default: [`Options::default`]; see [`crate::config`] for files and the environment.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Bring the schema up to date at start. Default false: then a schema that is missing or behind is an error.
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// Publishes the outbox. Without a publisher its rows are left to others.
    pub fn publisher(self, publisher: impl Publisher) -> Self {
        self.runner(Category::Outbox, PublisherRunner(Arc::new(publisher)))
    }

    /// Handles inbox messages of one type. Once one type has a handler, this instance claims inbox rows of every type.
    pub fn handler<M, H>(mut self, message_type: impl Into<String>, handler: H) -> Self
    where
        M: DeserializeOwned + Send + 'static,
        H: Handler<M>,
    {
        let message_type = message_type.into();
        if !self.handlers.add(message_type.clone(), handler) {
            self.twice = Some(format!("handlers for message type {message_type:?}"));
        }
        self
    }

    /// Runs the rows of a category by code that sees bytes: the seam below publishers and handlers.
    pub fn runner(mut self, category: Category, runner: impl Runner) -> Self {
        if self.runners.iter().any(|(taken, _)| *taken == category) {
            self.twice = Some(format!("runners for category {category}"));
        }
        self.runners.push((category, Arc::new(runner)));
        self
    }

    /// Puts an actor of your own under the pump's supervision, in the group `users`: started after the heartbeat and before the first
    /// claim, stopped after the last handler. See [`crate::supervision`].
    pub fn supervise<A: Actor<Context = actix::Context<A>>>(mut self, spec: Spec<A>) -> Self {
        self.users = self.users.child(spec);
        self
    }

    /// The same for a group of actors with a policy of its own.
    pub fn supervise_group(mut self, group: Group) -> Self {
        self.users = self.users.group(group);
        self
    }

    /// Checks everything, joins the members, and starts to claim. Works from any runtime, and from a plain thread through any executor.
    pub async fn start(mut self) -> Result<WorkPump, Error> {
        self.options.validate()?;
        let schema = SchemaName::new(&self.schema)?;
        let pooled = parse("database", &self.database_url)?;
        let direct =
            self.direct_url.as_deref().map_or_else(|| Ok(pooled.clone()), |url| parse("direct", url))?;
        self.collect_runners()?;

        // One thread is enough to move bytes; it must only never be busy with anything else.
        let io = OwnRuntime::start("workpump-db-io", 1)?;
        self.check_schema(&io, &direct).await?;
        check_place(&io, &pooled, &direct).await?;

        let identity = self.identity();
        let handlers = OwnRuntime::start("workpump-handler", handler_threads(&self.options))?;
        let keep = self.options.settle.keep_completed;
        let work = {
            // The pool starts a timer when it is made, and the caller may have no runtime.
            let io = io.handle();
            let _inside = io.enter();
            Arc::new(PgWorkStore::new(&schema, &pooled, direct.clone(), io.clone(), keep))
        };
        // No session is opened where nobody watches.
        let watch = PgDeathWatch::new(&schema, direct.clone()).driven_by(io.handle());
        let watch = self.options.liveness.death_watch.then(|| Arc::new(watch) as Arc<dyn DeathWatch>);
        let runs = self.runners.iter().map(|(category, _)| *category).collect();
        let engine = Engine::start(EngineParts {
            options: self.options,
            identity,
            sweep: Arc::new(PgSweepStore::new(&schema, work.pool())),
            watch,
            doorbell: Some(Arc::clone(&work) as Arc<dyn Doorbell>),
            route: Arc::new(PgProducersRoute::new(work.pool())),
            work,
            direct: Some(Arc::new(PgDirectConnector::new(&schema, direct.clone(), io.handle()))),
            instances: Arc::new(PgInstanceStore::new(&schema, direct.clone(), pooled.clone())),
            renewals: Arc::new(PgRenewalStore::new(&schema, direct, pooled)),
            runners: self.runners,
            handlers: handlers.handle(),
            users: self.users,
            start_deadline: START_DEADLINE,
        })
        .await?;
        let hub = hear_signals(&engine).await?;
        let producer = Producer::new(&self.schema)?;
        Ok(WorkPump { engine, producer, runs, hub, _handlers: handlers, _io: io })
    }

    fn collect_runners(&mut self) -> Result<(), Error> {
        if !self.handlers.is_empty() {
            if self.runners.iter().any(|(taken, _)| *taken == Category::Inbox) {
                self.twice = Some("runners for category inbox".to_owned());
            }
            self.runners.push((Category::Inbox, Arc::new(std::mem::take(&mut self.handlers))));
        }
        match self.twice.take() {
            Some(what) => Err(Error::Twice { what }),
            None if self.runners.is_empty() => Err(Error::NothingToRun),
            None => Ok(()),
        }
    }

    async fn check_schema(&self, io: &OwnRuntime, direct: &Config) -> Result<(), Error> {
        let (config, schema, may_migrate) = (direct.clone(), self.schema.clone(), self.migrate);
        let checked = io.handle().spawn(async move {
            let mut session =
                Session::open(&config).await.map_err(|error| Error::Connect(error.to_string()))?;
            if may_migrate {
                migrate_on(&mut session.client, &schema).await?;
            }
            check_schema(&session.client, &schema).await
        });
        checked.await.map_err(|error| Error::Connect(error.to_string()))?
    }

    fn identity(&self) -> InstanceIdentity {
        let program = || {
            let path = std::env::current_exe().ok()?;
            Some(path.file_stem()?.to_string_lossy().into_owned())
        };
        InstanceIdentity {
            id: InstanceId::fresh(),
            service_name: self.service_name.clone().or_else(program).unwrap_or_else(|| "workpump".to_owned()),
            host_name: host_name(),
            process_id: std::process::id().try_into().unwrap_or(i32::MAX),
        }
    }
}

/// Refuses two URLs that lead to different databases. An address that cannot be asked is left to the gate, which proves its way all the time.
async fn check_place(io: &OwnRuntime, pooled: &Config, direct: &Config) -> Result<(), Error> {
    if pooled == direct {
        return Ok(());
    }
    let (pooled, direct) = (pooled.clone(), direct.clone());
    let compared = io.handle().spawn(tokio::time::timeout(PLACE_DEADLINE, async move {
        let (pooled, direct) = tokio::try_join!(Session::open(&pooled), Session::open(&direct))?;
        let mut verdict = Ok(());
        // A server may be started again between the two questions; not twice in a row.
        for _ in 0..2 {
            let (here, there) = tokio::try_join!(Place::ask(&pooled.client), Place::ask(&direct.client))?;
            let Some(leads_to) = here.instead(&there) else { return Ok(Ok(())) };
            let (database, direct) = (here.database, there.database);
            verdict = Err(Error::LeadsElsewhere { leads_to, database, direct });
        }
        Ok::<_, OpenError>(verdict)
    }));
    let error = match compared.await {
        Ok(Ok(Ok(verdict))) => return verdict,
        Ok(Ok(Err(error))) => error,
        Ok(Err(_)) => OpenError::Late,
        Err(error) => return Err(Error::Connect(error.to_string())),
    };
    tracing::warn!(%error, "whether both URLs lead to the same database could not be asked, starting all the same");
    Ok(())
}

/// Adds the actor that hears signals to the pump's own, on their thread: nothing of a user's can hold it up.
async fn hear_signals(engine: &Engine) -> Result<Arc<Hub>, Error> {
    let (hub, registry) = (Arc::new(Hub::default()), engine.registry());
    let actor = HubActor::spec(&hub);
    let none = |_| StartError::Child(StartFailed::NoSuchChild("notify_gate".into()));
    let (subscribe, unsubscribe) = (registry.recipient().map_err(none)?, registry.recipient().map_err(none)?);
    hub.connect(subscribe, unsubscribe, actor.addr().recipient());
    registry.add("work", actor).await.map_err(StartError::Child)?;
    Ok(hub)
}

fn host_name() -> String {
    let from_system = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = std::env::var("HOSTNAME").ok().or_else(from_system).unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown".to_owned() } else { name.to_owned() }
}

/// Twice the cores and at least four: a handler that blocks its thread should not stop the others on a small machine.
fn handler_threads(options: &Options) -> usize {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    options.dispatch.handler_threads.unwrap_or_else(|| (2 * cores).max(4))
}

/// A running pump. Drop it only after [`WorkPump::drain`]: what is in flight otherwise waits for its lease to end.
pub struct WorkPump {
    engine: Engine,
    producer: Producer,
    /// What this instance has runners for.
    runs: Vec<Category>,
    hub: Arc<Hub>,
    // Dropped last, in this order: handlers may still be running, and sessions serve the last settlements.
    _handlers: OwnRuntime,
    _io: OwnRuntime,
}

impl std::fmt::Debug for WorkPump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkPump")
            .field("instance", &self.instance_id())
            .field("ready", &self.is_ready())
            .finish_non_exhaustive()
    }
}

impl WorkPump {
    /// Begins a pump on this database. A URL in the form `postgresql://user:password@host:port/database`, or keywords and values.
    pub fn builder(database_url: impl Into<String>) -> Builder {
        Builder {
            database_url: database_url.into(),
            direct_url: None,
            schema: "public".to_owned(),
            service_name: None,
            options: Options::default(),
            migrate: false,
            runners: Vec::new(),
            handlers: Handlers::default(),
            users: Group::new("users").on(Placement::Shared("users")).contained(),
            twice: None,
        }
    }

    /// The id this pump is known by now in `wh_service_instances`. After an eviction it is another one: no id is used twice.
    pub fn instance_id(&self) -> uuid::Uuid {
        self.engine.instance_id().0
    }

    /// Whether the pump's direct session holds its alive-lock, as far as the pump knows: then peers notice its death within milliseconds.
    /// False behind a pooler, and while the session is being opened again; `wh_live_instances` says what the database sees.
    pub fn is_alive_lock_held(&self) -> bool {
        self.engine.is_alive_lock_held()
    }

    /// Stores work in this pump's schema.
    pub fn producer(&self) -> &Producer {
        &self.producer
    }

    /// Commits a transaction that stored work and, when something of it is for this pump to run, claims at once. Several batches add up:
    /// `pump.commit(transaction, orders + letters)`.
    ///
    /// One round trip, as any commit. Unlike a plain one it is an error when the server rolls back because an earlier statement of the
    /// transaction had failed. Meant for the outermost transaction: what commits a savepoint is not visible yet. Dropping the future leaves
    /// it open whether the transaction is committed.
    ///
    /// Work for other instances is rung for by the database, with this and with every other commit. Work that is scheduled for later comes
    /// in its time.
    ///
    /// # Errors
    ///
    /// [`CommitError::RolledBack`]: nothing was written, and nobody is woken. [`CommitError::Unknown`]: the answer was lost; in case it is
    /// committed, the pump looks.
    pub async fn commit(
        &self,
        transaction: Transaction<'_>,
        enqueued: impl Borrow<Enqueued>,
    ) -> Result<(), CommitError> {
        let committed = commit(transaction).await;
        if !matches!(committed, Err(CommitError::RolledBack { .. })) {
            self.committed(enqueued);
        }
        committed
    }

    /// For transactions that were committed in another way, such as those of pools that wrap them: claims at once when something of it is
    /// for this pump to run, and says whether it does.
    pub fn committed(&self, enqueued: impl Borrow<Enqueued>) -> bool {
        let wakes = enqueued.borrow().brings_any_of(&self.runs);
        if wakes {
            self.wake();
        }
        wakes
    }

    /// Claims at once, whatever the poll interval: for work that was stored without a [`Producer`], after its commit.
    pub fn wake(&self) {
        self.engine.request_immediate_poll();
    }

    /// Hears the signals of a topic in this pump's schema, for as long as the stream is kept. The first word is
    /// [`Signal::Listening`](crate::signals::Signal::Listening); it does not come while there is no direct session, so not at all behind a
    /// pooler only: [`gate`](Self::gate) says why. See [`crate::signals`].
    ///
    /// Any number of topics and streams share the pump's one direct session.
    pub fn subscribe<T>(&self, topic: &Topic<T>) -> Signals<T> {
        Signals::new(topic, &self.hub, self.producer.channel(topic))
    }

    /// What is known of the notify gate: whether NOTIFY is proven to reach this pump, why not, and when that was last proven. Asks nobody.
    pub fn gate(&self) -> GateReport {
        self.engine.gate()
    }

    /// Proves now that NOTIFY reaches this pump, and says how it went: one ring through the database URL that has to come back on the direct
    /// session, which is opened first if need be. Takes as long as `gate.probe_timeout_seconds` allows, or a connect.
    pub async fn probe_gate(&self) -> GateReport {
        self.engine.probe_gate().await
    }

    /// False while the pump takes no work: not registered yet, fenced, evicted until it is a member under a fresh id, its heartbeat
    /// switched off, an actor down, or draining. For readiness checks; [`WorkPump::not_ready_because`] says why.
    pub fn is_ready(&self) -> bool {
        self.engine.is_ready()
    }

    /// Every reason why [`WorkPump::is_ready`] is false, for the log and the body of a readiness check; `None` while it is true. Claims
    /// that are disabled make no pump unready, and are named only beside another reason.
    pub fn not_ready_because(&self) -> Option<String> {
        self.engine.not_ready_because()
    }

    /// Switches the heartbeat on or off at run time: the option `heartbeat.enabled`, a kill-switch. Returns at once; every incarnation and
    /// every later id of this pump goes by it.
    ///
    /// Off: no more beats and no claims, the alive-lock is let go, so peers take this instance for dead after the grace and take its rows
    /// over. Handlers go on until it can no longer prove its leases; then it is fenced as after a cut. An eviction is not followed
    /// by a fresh id. On: it beats again under its id, or under a fresh one when that was evicted.
    pub fn set_heartbeat(&self, enabled: bool) {
        self.engine.set_heartbeat(enabled);
    }

    /// Accounts of all actors, each of itself: state, counters, last error, last success.
    pub async fn observe(&self) -> Vec<Account> {
        self.engine.observe().await
    }

    /// The tree of actors, the pump's and yours: addresses, health, events. Its addresses stay good over all restarts.
    pub fn registry(&self) -> &Registry {
        self.engine.registry()
    }

    /// Stops in reverse: no more claims, unstarted rows handed back with their attempt refunded, running handlers awaited up to
    /// `dispatch.drain_deadline_seconds`, the last results written, the member gone. A second call waits for the first.
    pub async fn drain(&self) -> DrainReport {
        self.engine.drain().await
    }
}
