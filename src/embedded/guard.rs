//! What ends a server whose owner is gone.
//!
//! The rule: no way of dying leaves a server or a directory behind. Destructors do not run after `kill -9`, nor for the statics of
//! a test binary. So two things stand in: the kernel signals each child when its parent ends (`setpriv --pdeathsig`, Linux), and a
//! tiny shell, the guard, waits on a pipe that only the owner holds: when it closes, the guard ends what is left and removes the
//! directory. It works where there is no `setpriv`, too.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};

use super::EmbeddedError;
use super::account::Account;

/// Reads pids until the owner's end of the pipe closes, then ends those that still belong to the directory (`$1`) and removes it.
const GUARD: &str = r#"
trap '' HUP INT TERM
pids=
while read -r pid; do pids="$pids $pid"; done
[ -d "$1" ] || exit 0
ours() {
    if [ -d /proc/self ]; then line=$(tr '\0' ' ' < "/proc/$1/cmdline"); else line=$(ps -o args= -p "$1"); fi 2>/dev/null
    case "$line" in *"$2"*) return 0 ;; *) return 1 ;; esac
}
for pid in $pids; do ours "$pid" "$1" && kill -QUIT "$pid"; done
for pid in $pids; do
    tries=0
    while ours "$pid" "$1" && [ $tries -lt 100 ]; do tries=$((tries + 1)); sleep 0.1; done
    ours "$pid" "$1" && kill -KILL "$pid"
done
rm -rf "$1"
"#;

/// The shell that outlives us for a moment.
#[derive(Debug)]
pub(super) struct Guard {
    shell: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    pub(super) fn over(dir: &Path) -> Result<Self, EmbeddedError> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "workpump-guard"]).arg(dir).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A Ctrl-C in the terminal goes to the whole process group; the guard must survive it.
        command.process_group(0);
        let mut shell = spawn_from_immortal_thread(command)?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }

    pub(super) fn watch(&mut self, pid: u32) {
        if let Some(pipe) = &mut self.pipe {
            // A guard that was killed is no reason to refuse service; the kernel's signal is still there.
            drop(writeln!(pipe, "{pid}"));
        }
    }

    /// To be called when the directory is gone: the shell then ends at once.
    pub(super) fn dismiss(&mut self) {
        self.pipe = None;
        drop(self.shell.wait());
    }
}

/// A command that runs as `account`, in its own process group, and dies with us where the system can do that.
pub(super) fn command(program: &Path, account: Option<Account>) -> Command {
    let mut command = if let Some(setpriv) = SETPRIV.as_deref() {
        let mut command = Command::new(setpriv);
        if let Some(Account { uid, gid }) = account {
            command.arg(format!("--reuid={uid}")).arg(format!("--regid={gid}")).arg("--clear-groups");
        }
        // setpriv sets it after the change of user (which would clear it) and then becomes the program, keeping the pid.
        command.args(["--pdeathsig", "QUIT", "--"]).arg(program);
        command
    } else {
        let mut command = Command::new(program);
        if let Some(Account { uid, gid }) = account {
            command.gid(gid).uid(uid);
        }
        command
    };
    command.process_group(0).current_dir("/").stdin(Stdio::null()).env_clear().env("LC_ALL", "C");
    for kept in ["PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}

/// `setpriv` of util-linux, if it is there and can set the signal (that of `BusyBox` cannot).
static SETPRIV: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    let found = std::env::split_paths(&path).map(|dir| dir.join("setpriv")).find(|file| file.is_file())?;
    let mut probe = Command::new(&found);
    probe
        .args(["--pdeathsig", "QUIT", "--", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success()).then_some(found)
});

type SpawnJob = (Command, mpsc::Sender<std::io::Result<Child>>);

static SPAWNER: LazyLock<Mutex<mpsc::Sender<SpawnJob>>> = LazyLock::new(|| {
    let (jobs, inbox) = mpsc::channel::<SpawnJob>();
    std::thread::spawn(move || {
        for (mut command, answer) in inbox {
            drop(answer.send(command.spawn()));
        }
    });
    Mutex::new(jobs)
});

/// The kernel's signal fires when the *thread* that forked ends, and a test's thread ends with its test: all children are born on
/// one thread that never ends.
pub(super) fn spawn_from_immortal_thread(command: Command) -> Result<Child, EmbeddedError> {
    let what = format!("start {}", command.get_program().to_string_lossy());
    let (answer, answered) = mpsc::channel();
    let sent = SPAWNER.lock().unwrap_or_else(PoisonError::into_inner).send((command, answer));
    let gone = || EmbeddedError::io(what.clone(), std::io::Error::other("the spawning thread is gone"));
    sent.map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?.map_err(|e| EmbeddedError::io(what.clone(), e))
}

/// The direct children of a process.
pub(super) fn children_of(pid: u32) -> Vec<u32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok().or_else(|| {
        let answer = Command::new("pgrep").args(["-P", &pid.to_string()]).output().ok()?;
        String::from_utf8(answer.stdout).ok()
    });
    listed.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
