//! The directory of one private server: short-lived, closed to others, removed in every case.
//!
//! The rule: one lock tells the living from the dead. The owner holds a lock on a file inside for as long as it lives; a directory
//! whose lock can be taken is a leftover and is swept. Pids would lie, because they are reused.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

use super::EmbeddedError;
use super::account::Account;
use super::guard::{self, Guard};

/// Short, because the path of a Unix socket may have no more than about a hundred bytes.
const PREFIX: &str = "workpump-";
const LOCK: &str = "owner.lock";
/// Room a directory in memory must have: a cluster takes 40 MB, its log of changes up to some hundred.
const MEMORY_NEEDED: u64 = 512 * 1024 * 1024;

/// A private directory for a server and its companions (a pooler, say), which run under one account and end with this process.
#[derive(Debug)]
pub struct PrivateDir {
    account: Option<Account>,
    guard: Guard,
    dir: Option<TempDir>,
    path: PathBuf,
    _lock: File,
}

impl PrivateDir {
    /// Makes a directory in memory when there is room, else among the temporary files, and removes leftovers of the dead there.
    pub fn create() -> Result<Self, EmbeddedError> {
        Self::create_for(Account::to_step_down_to()?)
    }

    /// The same for programs that run as this process does, root included.
    pub fn create_for_own_user() -> Result<Self, EmbeddedError> {
        Self::create_for(None)
    }

    fn create_for(account: Option<Account>) -> Result<Self, EmbeddedError> {
        let parent = parent_dir(account.is_some());
        sweep(&parent);
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent);
        let dir =
            dir.map_err(|e| EmbeddedError::io(format!("create a directory in {}", parent.display()), e))?;
        let path = dir.path().to_owned();
        let lock = take_lock(&path).map_err(|e| EmbeddedError::io(format!("lock {}", path.display()), e))?;
        fs::set_permissions(&path, Permissions::from_mode(0o700))
            .and_then(|()| account.map_or(Ok(()), |a| chown(&path, Some(a.uid), Some(a.gid))))
            .map_err(|e| EmbeddedError::io(format!("hand over {}", path.display()), e))?;
        let guard = Guard::over(&path)?;
        Ok(Self { account, guard, dir: Some(dir), path, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file that the servers of this directory can read.
    pub fn write(&self, name: &str, content: &str) -> Result<PathBuf, EmbeddedError> {
        let file = self.path.join(name);
        fs::write(&file, content)
            .and_then(|()| self.account.map_or(Ok(()), |a| chown(&file, Some(a.uid), Some(a.gid))))
            .map_err(|e| EmbeddedError::io(format!("write {}", file.display()), e))?;
        Ok(file)
    }

    /// A command that runs under the directory's account and, when given to [`PrivateDir::spawn`], ends with this process. Name
    /// programs by their full path: not every account has `/usr/sbin` in PATH.
    pub fn command(&self, program: &Path) -> Command {
        guard::command(program, self.account)
    }

    /// Starts a long-running program. One argument of it must name a file in this directory: the guard knows it by that.
    pub fn spawn(&mut self, command: Command) -> Result<Child, EmbeddedError> {
        let child = guard::spawn_from_immortal_thread(command)?;
        self.guard.watch(child.id());
        Ok(child)
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // First the directory, then the guard: it ends at once when there is nothing to remove.
        if let Some(dir) = self.dir.take()
            && let Err(e) = dir.close()
        {
            tracing::warn!(dir = %self.path.display(), error = %e, "could not remove the private directory; the guard tries again");
        }
        self.guard.dismiss();
    }
}

fn parent_dir(must_be_open_to_others: bool) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(memory).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    if room >= MEMORY_NEEDED && tempfile::tempfile_in(memory).is_ok() {
        return memory.to_owned();
    }
    let temp = std::env::temp_dir();
    let open = temp
        .ancestors()
        .all(|dir| fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0));
    // The server's account cannot reach a TMPDIR below, say, root's home.
    if must_be_open_to_others && !open { PathBuf::from("/tmp") } else { temp }
}

/// Taken under another name and then renamed, so that a sweeper never meets an unlocked lock file of the living.
fn take_lock(dir: &Path) -> std::io::Result<File> {
    let unborn = dir.join("owner.unborn");
    let lock = File::create(&unborn)?;
    lock.lock()?;
    fs::rename(&unborn, dir.join(LOCK))?;
    Ok(lock)
}

/// Removes directories whose owner and guard were both killed.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let real_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if ours
            && real_dir
            && let Ok(lock) = File::open(entry.path().join(LOCK))
            && lock.try_lock().is_ok()
        {
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leftover_is_swept_and_the_living_stay() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let dir = parent.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let (dead, alive, foreign) = (make("workpump-dead"), make("workpump-alive"), make("other"));
        let unlocked = make("workpump-young");
        drop(take_lock(&dead).unwrap());
        drop(take_lock(&foreign).unwrap());
        let held = take_lock(&alive).unwrap();

        sweep(parent.path());

        assert!(!dead.exists(), "the dead one is gone");
        assert!(alive.exists() && foreign.exists() && unlocked.exists(), "the others stay");
        drop(held);
    }
}
