//! Pumps that never poll, and what their handlers were given.
#![allow(dead_code, unreachable_pub, reason = "as the other fixtures of the tests")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{Account, Category, Failure, Job, Options, Runner, WorkPump};

use crate::common::{self, Database, wait::eventually};
use crate::sql::run;

/// How late anything may start. A wake that is lost is only made good after half a lease, 150 s.
pub const LATE: Duration = Duration::from_secs(20);

/// No polls while the gate is available.
pub fn signals_only() -> Options {
    let mut options = Options::default();
    options.claim.enable_safety_net_poll = false;
    options.dispatch.handler_threads = Some(1);
    options
}

/// The same for an instance that takes one row at a time.
pub fn one_at_a_time() -> Options {
    let mut options = signals_only();
    options.dispatch.max_in_flight = 1;
    options
}

/// A row whose handler has begun.
#[derive(Debug)]
pub struct Started {
    pub id: Uuid,
    pub at: Instant,
    pub by: Uuid,
    pub attempts: u32,
}

/// A runner made of a closure.
#[derive(Clone)]
pub struct Run(Arc<dyn Fn(Job) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync>);

impl Run {
    pub fn new<R>(run: impl Fn(Job) -> R + Send + Sync + 'static) -> Self
    where
        R: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        Self(Arc::new(move |job| run(job).boxed()))
    }

    /// Tells of each row.
    pub fn telling(tell: UnboundedSender<Started>) -> Self {
        Self::new(move |job| {
            started(&tell, &job);
            std::future::ready(Ok(()))
        })
    }
}

impl Runner for Run {
    fn run(&self, job: Job) -> BoxFuture<'static, Result<(), Failure>> {
        (self.0)(job)
    }
}

/// Tells of one row.
pub fn started(tell: &UnboundedSender<Started>, job: &Job) {
    let (id, attempts) = (job.work.key.id.0, job.work.attempts);
    // The test may be over.
    let _ = tell.send(Started { id, at: Instant::now(), by: job.instance.0, attempts });
}

/// Starts a pump that runs all categories so.
pub async fn pump(url: &str, options: Options, run: &Run) -> WorkPump {
    pump_of(&Category::ALL, url, options, run).await
}

/// Starts a pump that runs these categories so.
pub async fn pump_of(categories: &[Category], url: &str, options: Options, run: &Run) -> WorkPump {
    let mut builder = WorkPump::builder(url).options(options);
    for category in categories {
        builder = builder.runner(*category, run.clone());
    }
    builder.start().await.expect("starts")
}

/// What the claimer says of itself.
pub async fn claimer(pump: &WorkPump) -> Account {
    let accounts = pump.observe().await;
    accounts.into_iter().find(|account| account.name == "claim").expect("a claimer")
}

/// Waits until a pump sleeps behind its doorbell.
pub async fn asleep(pump: &WorkPump) {
    eventually("the pump is asleep", async || {
        let claimer = claimer(pump).await;
        claimer.counter("armed") == 1 && claimer.state == "waiting"
    })
    .await;
}

/// A pump that sleeps, in a database of its own, and what it starts.
pub struct Asleep {
    pub db: Database,
    pub client: Client,
    pub pump: WorkPump,
    pub telling: UnboundedReceiver<Started>,
}

impl Asleep {
    pub async fn new(options: Options) -> Self {
        let (tell, telling) = unbounded_channel();
        Self::running(options, &Run::telling(tell), telling).await
    }

    pub async fn running(options: Options, run: &Run, telling: UnboundedReceiver<Started>) -> Self {
        let db = common::database().await;
        let client = db.connect().await;
        let pump = pump(db.url(), options, run).await;
        asleep(&pump).await;
        Self { db, client, pump, telling }
    }

    /// The next row that is started.
    pub async fn next(&mut self) -> Started {
        next(&mut self.telling).await
    }
}

/// The next row that is started, in time.
pub async fn next(telling: &mut UnboundedReceiver<Started>) -> Started {
    timeout(LATE, telling.recv()).await.expect("started in time").expect("the pump lives")
}

/// Stores one row in the outbox, and says which.
pub async fn store(client: &Client, stream: Option<Uuid>, more: &str) -> Uuid {
    let id = Uuid::now_v7();
    let stream = stream.map(|stream| format!(r#", "stream_id": "{stream}""#)).unwrap_or_default();
    let message = format!(r#"[{{"message_id": "{id}", "message_type": "t", "payload": 1{stream}{more}}}]"#);
    run(client, &format!("select store_outbox_messages('{message}')")).await;
    id
}

/// The stream belongs to this instance.
pub async fn assign(client: &Client, stream: Uuid, owner: Uuid) {
    run(
        client,
        &format!(
            "insert into wh_active_streams (stream_id, assigned_instance_id, lease_expiry) \
         values ('{stream}', '{owner}', clock_timestamp() + interval '1 hour') \
         on conflict (stream_id) do update set assigned_instance_id = excluded.assigned_instance_id"
        ),
    )
    .await;
}

/// The value below which this part of the sorted figures lies.
pub fn quantile(figures: &mut [Duration], part: f64) -> Duration {
    figures.sort_unstable();
    figures[((figures.len() - 1) as f64 * part).round() as usize]
}
