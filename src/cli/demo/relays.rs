//! The instances: child processes that run `workpump relay`.
//!
//! The rule: no child survives its parent, not even one that is killed. They are started through the private directory of the run,
//! whose guard ends them and removes their output when this process is gone. The database address goes by the environment, because
//! everybody may read a process's arguments.

use std::fmt::Write;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use uuid::Uuid;
use workpump::embedded::PrivateDir;

use crate::cli::CliError;

/// How long all instances together may take to become members.
const READY_WITHIN: Duration = Duration::from_mins(1);
/// How long they may take to drain before they are killed.
const DRAIN_WITHIN: Duration = Duration::from_secs(30);
/// How often a child, which sends no event, is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// One child.
#[derive(Debug)]
struct Instance {
    child: Child,
    log: PathBuf,
    id: Option<Uuid>,
    ended: Option<ExitStatus>,
}

/// All children, and the file that they append to.
#[derive(Debug)]
pub(super) struct Relays {
    instances: Vec<Instance>,
    output: PathBuf,
    _dir: PrivateDir,
}

impl Relays {
    /// Starts them and waits until all are members, so that the figures show the work and not the start.
    pub(super) async fn start(url: &str, schema: &str, count: u32) -> Result<Self, CliError> {
        let mut dir = PrivateDir::create_for_own_user()?;
        let output = dir.write("relayed.jsonl", "")?;
        let program = std::env::current_exe().map_err(CliError::io("find this program's own file"))?;
        let mut instances = Vec::new();
        for number in 1..=count {
            let log = dir.write(&format!("relay-{number}.log"), "")?;
            let stderr =
                File::options().append(true).open(&log).map_err(CliError::io("open a relay's log"))?;
            let mut command = dir.command(&program);
            command.arg("relay").arg("--to").arg(&output).envs(std::env::vars_os());
            // What a user set for his own relays is no business of the demo's database.
            command.env_remove("WORKPUMP_DIRECT_URL").env_remove("WORKPUMP_PG_BIN");
            command.env("WORKPUMP_DATABASE_URL", url).env("WORKPUMP_SCHEMA", schema);
            command.stdout(Stdio::null()).stderr(stderr);
            instances.push(Instance { child: dir.spawn(command)?, log, id: None, ended: None });
        }
        let mut relays = Self { instances, output, _dir: dir };
        if let Ok(joined) = tokio::time::timeout(READY_WITHIN, relays.join(url, schema)).await {
            return joined.map(|()| relays);
        }
        let (up, seconds) =
            (relays.instances.iter().filter(|one| one.id.is_some()).count(), READY_WITHIN.as_secs());
        let log = relays.log_tails(|one| one.id.is_none());
        Err(CliError::Failed(format!("{up} of {count} instances were ready after {seconds} s{log}")))
    }

    async fn join(&mut self, url: &str, schema: &str) -> Result<(), CliError> {
        loop {
            if !self.ended()?.is_empty() {
                let log = self.log_tails(|one| one.ended.is_some());
                return Err(CliError::Failed(format!("an instance ended while it started{log}")));
            }
            for member in workpump::status(url, schema).await?.instances {
                let mut known = self.instances.iter_mut();
                if let Some(instance) =
                    known.find(|one| i64::from(one.child.id()) == i64::from(member.process_id))
                {
                    instance.id = Some(member.instance_id);
                }
            }
            if self.instances.iter().all(|one| one.id.is_some()) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY * 4).await;
        }
    }

    /// The file that all append to.
    pub(super) fn output(&self) -> Result<File, CliError> {
        File::open(&self.output).map_err(CliError::io("open the relayed output"))
    }

    /// Whether this instance is one of these and has not ended, as far as is known.
    pub(super) fn is_running(&self, instance: Uuid) -> bool {
        self.running(instance).is_some()
    }

    /// `kill -9`. Its end is seen by [`Relays::ended`].
    pub(super) fn kill(&self, instance: Uuid) {
        self.signal(instance, Signal::KILL);
    }

    fn running(&self, instance: Uuid) -> Option<&Instance> {
        self.instances.iter().find(|one| one.id == Some(instance) && one.ended.is_none())
    }

    fn signal(&self, instance: Uuid, signal: Signal) {
        let child = self.running(instance).map(|one| one.child.id());
        if let Some(pid) = child.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
            // An error means that it is gone already.
            let _ = kill_process(pid, signal);
        }
    }

    /// The instances that ended since the last look, without having been told to.
    pub(super) fn ended(&mut self) -> Result<Vec<Option<Uuid>>, CliError> {
        let mut ended = Vec::new();
        for instance in self.instances.iter_mut().filter(|one| one.ended.is_none()) {
            instance.ended = instance.child.try_wait().map_err(CliError::io("look at a relay"))?;
            if instance.ended.is_some() {
                ended.push(instance.id);
            }
        }
        Ok(ended)
    }

    /// Whether nobody is left to relay anything.
    pub(super) fn all_ended(&self) -> bool {
        self.instances.iter().all(|one| one.ended.is_some())
    }

    /// Asks all to drain and waits for their end. Returns what went wrong.
    pub(super) async fn drain(&mut self) -> Result<Option<String>, CliError> {
        let running: Vec<usize> =
            (0..self.instances.len()).filter(|n| self.instances[*n].ended.is_none()).collect();
        for instance in running.iter().map(|n| &self.instances[*n]) {
            if let Some(pid) = i32::try_from(instance.child.id()).ok().and_then(Pid::from_raw) {
                // An error means that it is gone already.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let all_ended = async {
            while !self.all_ended() {
                tokio::time::sleep(LOOK_EVERY).await;
                self.ended()?;
            }
            Ok::<_, CliError>(())
        };
        let drained = tokio::time::timeout(DRAIN_WITHIN, all_ended).await;
        let seconds = DRAIN_WITHIN.as_secs();
        if drained.is_err() {
            let log = self.log_tails(|one| one.ended.is_none());
            return Ok(Some(format!("not all instances drained within {seconds} s{log}")));
        }
        drained.unwrap_or(Ok(()))?;
        let failed = |one: &Instance| one.ended.is_some_and(|status| !status.success());
        if running.iter().any(|n| failed(&self.instances[*n])) {
            return Ok(Some(format!("an instance failed while draining{}", self.log_tails(failed))));
        }
        Ok(None)
    }

    /// The last lines of every log.
    pub(super) fn logs(&self) -> String {
        self.log_tails(|_| true)
    }

    /// The last lines of the logs of some instances, each after a line of its own.
    fn log_tails(&self, which: impl Fn(&Instance) -> bool) -> String {
        let mut text = String::new();
        for (at, instance) in self.instances.iter().enumerate().filter(|(_, one)| which(one)) {
            let log = fs::read_to_string(&instance.log).unwrap_or_default();
            let lines: Vec<&str> = log.trim_end().lines().collect();
            let last = lines[lines.len().saturating_sub(5)..].join("\n    ");
            let state = instance.ended.map_or_else(|| "running".to_owned(), |status| status.to_string());
            let _ = write!(text, "\n  instance {} ({state}): {last}", at + 1);
        }
        text
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        for instance in self.instances.iter_mut().filter(|one| one.ended.is_none()) {
            drop(instance.child.kill());
            drop(instance.child.wait());
        }
    }
}
