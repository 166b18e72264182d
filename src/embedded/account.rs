//! As whom a server runs.
//!
//! The rule: never as root, because PostgreSQL and PgBouncer refuse to; as `postgres` where that user exists, else as `nobody`.
//! Anyone else runs servers as himself.

use std::process::Command;

use super::EmbeddedError;

/// Accounts tried, in this order.
const CANDIDATES: [&str; 2] = ["postgres", "nobody"];

/// The user and group of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Account {
    /// The account to step down to; `None` when this process is not root and children simply inherit its user.
    pub(super) fn to_step_down_to() -> Result<Option<Self>, EmbeddedError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let found =
            CANDIDATES.iter().find_map(|name| Some(Self { uid: ask(name, "-u")?, gid: ask(name, "-g")? }));
        found.map(Some).ok_or(EmbeddedError::NoAccount)
    }
}

/// `id` knows users of every name service, unlike `/etc/passwd`.
fn ask(user: &str, flag: &str) -> Option<u32> {
    let answer = Command::new("id").args([flag, user]).output().ok()?;
    String::from_utf8(answer.stdout).ok()?.trim().parse().ok().filter(|id| *id != 0)
}
