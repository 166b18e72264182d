//! What is wrong with a pump's database, connections and schema, and what to do about it.
//!
//! The rule: asking and judging are apart. Each room asks for values and hands them to a pure function that makes findings of them, so
//! every threshold can be tested without a sick server. A question that is not answered is a finding of its own, and the others go on.
//! Nothing is written and nothing is created; everything ends within 15 s.
//!
//! | room | looks at |
//! |---|---|
//! | `ask` | sessions and questions with limits |
//! | `connection`, `notify` | who answers, whether notifications come through |
//! | `rights` | what the role may do |
//! | `schema`, `manifest` | ledger and objects, against the list of what migrations make |
//! | `server` | settings, clock, sessions, keepalives |
//! | `activity` | horizon, notification queue, dead rows |
//! | `instances` | members, and work that is stuck |

mod activity;
mod ask;
mod connection;
mod finding;
mod instances;
pub(crate) mod manifest;
mod notify;
mod rights;
mod schema;
mod server;

use serde::Serialize;
use tokio_postgres::Config;
use workpump_actors::port::NotificationStream;

use crate::connect::parse;
use crate::error::Error;
use crate::pg::migrate::LIBRARY_VERSION;
use crate::pg::schema_name::SchemaName;
use ask::{NoAnswer, Patient, Visit};
use connection::{Identity, Opened, Pooling};
pub use finding::{Finding, Group, Severity};
use rights::Rights;

/// Everything the doctor saw.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnosis {
    /// The schema.
    pub schema: String,
    /// This library's version.
    pub library_version: String,
    /// Whether there is neither a warning nor an error.
    pub healthy: bool,
    /// How many findings there are of each severity.
    pub counts: Counts,
    /// What was looked at: the worst first, then by group.
    pub findings: Vec<Finding>,
}

/// Findings of each severity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Broken.
    pub errors: usize,
    /// Worse than it should be.
    pub warnings: usize,
    /// Worth knowing.
    pub notes: usize,
    /// Well.
    pub ok: usize,
}

impl Diagnosis {
    fn new(schema: &SchemaName, mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.group));
        let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        let counts = Counts {
            errors: count(Severity::Error),
            warnings: count(Severity::Warning),
            notes: count(Severity::Note),
            ok: count(Severity::Ok),
        };
        let healthy = counts.errors + counts.warnings == 0;
        let (schema, library_version) = (schema.as_str().to_owned(), LIBRARY_VERSION.to_owned());
        Self { schema, library_version, healthy, counts, findings }
    }
}

/// Examines the pump in `schema` as an instance with these addresses would see it, for 15 s at most. `direct_url` leads past a pooler;
/// without it the database URL is taken for both.
///
/// An error means that nothing could be looked at, because an address or the schema's name cannot be read. A server that cannot be
/// reached is a finding.
pub async fn doctor(database_url: &str, direct_url: Option<&str>, schema: &str) -> Result<Diagnosis, Error> {
    let schema = SchemaName::new(schema)?;
    let database = parse("database", database_url)?;
    let direct = direct_url.map(|url| parse("direct", url)).transpose()?;
    let mut findings = Vec::new();
    if let Some(sessions) = Box::pin(Sessions::open(&database, direct.as_ref(), &mut findings)).await {
        sessions.examine(&schema, &mut findings).await;
    }
    Ok(Diagnosis::new(&schema, findings))
}

/// The sessions that everything is asked by.
struct Sessions {
    database: Patient,
    /// Past the pooler, and what it hears; none where there is no such session.
    direct: Option<(Patient, NotificationStream)>,
    /// Whether it was opened by an address of its own.
    two_addresses: bool,
}

impl Sessions {
    /// Opens both at once. None: there is nothing to ask more of.
    async fn open(database: &Config, direct: Option<&Config>, findings: &mut Vec<Finding>) -> Option<Self> {
        let visit = Visit::begin();
        let (sender, heard) = NotificationStream::channel();
        let listener = direct.unwrap_or(database);
        let (asked, listening) =
            tokio::join!(Patient::open(database, visit), Patient::listening(listener, sender, visit));
        let pooling = match &asked {
            Ok(patient) if patient.pooled_because.is_some() => connection::pooling(patient, database).await,
            _ => Pooling::Unknown,
        };
        findings.extend(connection::judge(&Opened {
            database: asked.as_ref().map(|patient| patient.pooled_because.as_deref()),
            pooling,
            direct: direct
                .map(|_| listening.as_ref().map(|direct| direct.as_ref().err().map(String::as_str))),
        }));
        let direct_session = listening.ok().and_then(Result::ok).map(|patient| (patient, heard));
        let database = asked.ok().filter(|_| pooling != Pooling::Statement)?;
        Some(Self { database, direct: direct_session, two_addresses: direct.is_some() })
    }

    async fn examine(mut self, schema: &SchemaName, findings: &mut Vec<Finding>) {
        let (identity, other) = self.connections(findings).await;
        let role = identity.as_ref().map_or_else(|_| String::new(), |identity| identity.role.clone());
        let rights = Rights::ask(&self.database, schema, &role).await;
        findings.extend(rights::judge(schema, &rights));
        // Beats, claims and renewals go by the direct address, which may log in as somebody else.
        if let (Some((direct, _)), Some(other)) =
            (&self.direct, other.as_ref().filter(|other| other.role != role))
        {
            findings.extend(rights::judge(schema, &Rights::ask(direct, schema, &other.role).await));
        }
        let mut usable = false;
        if rights.as_ref().is_ok_and(Rights::may_look) {
            let looked = schema::look(&self.database, schema).await;
            usable = looked.usable;
            findings.extend(looked.findings);
        }
        self.server(other.is_some_and(|other| other.local), findings).await;
        self.activity(schema, usable, findings).await;
        if usable {
            self.instances(schema, findings).await;
        }
    }

    /// Whether both sessions are in one database, and a notification gets from one to the other; who is at their ends.
    async fn connections(
        &mut self,
        findings: &mut Vec<Finding>,
    ) -> (Result<Identity, NoAnswer>, Option<Identity>) {
        let identity = Identity::ask(&self.database).await;
        let other = match &self.direct {
            Some((direct, _)) => Some(Identity::ask(direct).await),
            None => None,
        };
        findings.extend(connection::judge_identity(&identity, other.as_ref().filter(|_| self.two_addresses)));
        if let Some((direct, heard)) = &mut self.direct {
            findings.push(notify::judge(&notify::ring(&self.database, direct, heard).await));
        }
        (identity, other.and_then(Result::ok))
    }

    async fn server(&self, local: bool, findings: &mut Vec<Finding>) {
        findings.push(server::judge_clock(&server::skew(&self.database).await));
        let settings = server::settings(&self.database).await;
        findings.extend(server::judge_settings(&settings));
        if let Ok(settings) = &settings {
            let sessions = server::Sessions::ask(&self.database).await;
            findings.push(server::judge_room(settings, &sessions));
        }
        if let Some((direct, _)) = &self.direct {
            findings.push(server::judge_keepalives(&server::keepalives(direct).await, local));
        }
    }

    async fn activity(&self, schema: &SchemaName, usable: bool, findings: &mut Vec<Finding>) {
        findings.extend(activity::judge_horizon(&activity::Horizon::ask(&self.database).await));
        findings.push(activity::judge_queue(&activity::Queue::ask(&self.database).await));
        if usable {
            let tables = activity::Table::ask(&self.database, schema).await;
            findings.extend(activity::judge_tables(schema, &tables));
        }
    }

    async fn instances(&self, schema: &SchemaName, findings: &mut Vec<Finding>) {
        let members = instances::members(&self.database, schema).await;
        findings.extend(instances::judge_members(schema, &members));
        findings.push(instances::judge_release(&instances::unreleased(&self.database, schema).await));
        findings.extend(instances::judge_work(
            schema,
            &instances::work(&self.database, schema).await,
            &members,
        ));
        findings.push(instances::judge_dead_letters(&instances::dead_letters(&self.database, schema).await));
    }
}
