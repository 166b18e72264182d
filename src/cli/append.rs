//! Whole lines at the end of a file, a pipe or standard output.
//!
//! The rule: a line is there completely or not at all, and a row counts as relayed only when its line is there. Several processes may
//! append to one file; each batch is one write under a lock on the file. A disk that fills up in the middle of a line, or a writer
//! that was killed there, must not leave half a line for a reader to stumble over: it is cut off again, for its row was not settled
//! and comes again.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How lines of ours begin: only such an unfinished line is cut off, never what somebody else left without a line end.
pub(super) const LINE_START: &[u8] = b"{\"message_id\":";

/// The end of a file or a stream.
#[derive(Debug)]
pub(super) struct Appender {
    file: File,
    /// A regular file can be looked at and cut; a pipe or a terminal cannot.
    regular: bool,
    /// The rest of a line of which a stream took only the beginning; it goes first next time.
    unfinished: Vec<u8>,
}

/// What became of a batch.
#[derive(Debug)]
pub(super) struct Appended {
    /// So many lines, from the first on, are there.
    pub(super) lines: usize,
    /// Why the others are not.
    pub(super) error: Option<io::Error>,
}

impl Appender {
    /// Opens, and if need be creates, a file; `-` is standard output.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if path == Path::new("-") {
            // A handle of its own: std's buffers a line at a time.
            let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
            return Ok(Self { file, regular: false, unfinished: Vec::new() });
        }
        // Not for reading, too, at first: a named pipe opened both ways would never tell that its reader is gone.
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let mut regular = file.metadata()?.is_file();
        if regular {
            // One that may be written but not read is appended to all the same, without a look at its last line.
            match OpenOptions::new().append(true).read(true).open(path) {
                Ok(both) => file = both,
                Err(e) if e.kind() == ErrorKind::PermissionDenied => regular = false,
                Err(e) => return Err(e),
            }
        }
        Ok(Self { file, regular, unfinished: Vec::new() })
    }

    /// Appends lines, which end where `ends` says, in one write.
    pub(super) fn append(&mut self, lines: &[u8], ends: &[usize]) -> Appended {
        if !self.regular {
            return self.append_to_stream(lines, ends);
        }
        match self.file.lock() {
            Ok(()) => {
                let appended = self.append_to_file(lines, ends);
                // Closing the file would release it, too.
                drop(self.file.unlock());
                appended
            }
            // Some network file systems have no locks; one write a batch is then all that can be done.
            Err(e) if e.kind() == ErrorKind::Unsupported => self.append_to_file(lines, ends),
            Err(e) => Appended { lines: 0, error: Some(e) },
        }
    }

    fn append_to_file(&mut self, lines: &[u8], ends: &[usize]) -> Appended {
        let start = match self.finish_last_line() {
            Ok(start) => start,
            Err(e) => return Appended { lines: 0, error: Some(e) },
        };
        let (written, error) = write_fully(&mut self.file, lines);
        let whole = ends.partition_point(|end| *end <= written);
        let kept = if whole == 0 { 0 } else { ends[whole - 1] };
        if written > kept {
            // If even that fails, the next writer finds the half line and cuts it off.
            drop(self.file.set_len(start + kept as u64));
        }
        Appended { lines: whole, error }
    }

    /// Makes the file end with a line end, and returns its length.
    fn finish_last_line(&mut self) -> io::Result<u64> {
        let length = self.file.metadata()?.len();
        let mut last = [b'\n'];
        if length == 0 || self.file.read_exact_at(&mut last, length - 1).is_err() || last == *b"\n" {
            return Ok(length);
        }
        let start = self.start_of_last_line(length)?;
        let mut line = vec![0; usize::try_from(length - start).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut line, start)?;
        let ours = line.starts_with(LINE_START) || LINE_START.starts_with(&line);
        if ours && serde_json::from_slice::<serde::de::IgnoredAny>(&line).is_err() {
            self.file.set_len(start)?;
            return Ok(start);
        }
        self.file.write_all(b"\n")?;
        Ok(length + 1)
    }

    fn start_of_last_line(&self, length: u64) -> io::Result<u64> {
        let mut block = vec![0; 64 * 1024];
        let mut end = length;
        while end > 0 {
            let start = end.saturating_sub(block.len() as u64);
            let part = &mut block[..(end - start) as usize];
            self.file.read_exact_at(part, start)?;
            if let Some(found) = part.iter().rposition(|byte| *byte == b'\n') {
                return Ok(start + found as u64 + 1);
            }
            end = start;
        }
        Ok(0)
    }

    /// A stream cannot be cut: the line of which it took the beginning is finished before anything else.
    fn append_to_stream(&mut self, lines: &[u8], ends: &[usize]) -> Appended {
        let owed = self.unfinished.len();
        let all = [self.unfinished.as_slice(), lines].concat();
        let (written, error) = write_fully(&mut self.file, &all);
        if written < owed {
            self.unfinished.drain(..written);
            return Appended { lines: 0, error };
        }
        let written = written - owed;
        let whole = ends.partition_point(|end| *end <= written);
        let kept = if whole == 0 { 0 } else { ends[whole - 1] };
        self.unfinished.clear();
        if written > kept {
            self.unfinished.extend_from_slice(&lines[written..ends[whole]]);
        }
        Appended { lines: whole, error }
    }
}

/// Like `write_all`, but says how far it came. A file takes everything in the first write; a pipe may take it piecemeal.
fn write_fully(file: &mut impl Write, bytes: &[u8]) -> (usize, Option<io::Error>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Some(io::Error::from(ErrorKind::WriteZero))),
            Ok(more) => written += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return (written, Some(e)),
        }
    }
    (written, file.flush().err())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(n: usize) -> String {
        format!("{{\"message_id\":{n}}}\n")
    }

    fn file_with(content: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    fn append(path: &Path, n: usize) {
        let line = line(n);
        let appended = Appender::open(path).unwrap().append(line.as_bytes(), &[line.len()]);
        assert!(appended.error.is_none() && appended.lines == 1, "{appended:?}");
    }

    #[test]
    fn half_a_line_of_a_killed_writer_is_cut_off() {
        for half in ["{\"mess", "{\"message_id\":1,\"pay", "{"] {
            let file = file_with(&format!("{}{half}", line(0)));
            append(file.path(), 2);
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), line(0) + &line(2));
        }
        let only_half = file_with("{\"message_id\":1,\"pay");
        append(only_half.path(), 2);
        assert_eq!(std::fs::read_to_string(only_half.path()).unwrap(), line(2));
    }

    #[test]
    fn a_foreign_last_line_is_finished_and_kept() {
        for foreign in ["# notes", "{\"message_id\":7}"] {
            let file = file_with(foreign);
            append(file.path(), 2);
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), format!("{foreign}\n{}", line(2)));
        }
    }

    #[test]
    fn processes_that_append_to_one_file_do_not_tear_each_others_lines() {
        let file = file_with("");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = file.path();
                scope.spawn(move || (0..50).for_each(|n| append(path, writer * 1_000 + n)));
            }
        });
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(text.lines().count(), 200);
        assert!(text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
    }

    #[test]
    fn a_full_stream_takes_the_rest_of_its_torn_line_first() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut appender = Appender {
            file: File::from(std::os::fd::OwnedFd::from(writer)),
            regular: false,
            unfinished: b"1}\n".to_vec(),
        };
        let line = line(2);
        assert_eq!(appender.append(line.as_bytes(), &[line.len()]).lines, 1);
        drop(appender);
        let mut read = String::new();
        io::Read::read_to_string(&mut reader, &mut read).unwrap();
        assert_eq!(read, format!("1}}\n{line}"));
    }

    #[test]
    fn a_write_that_stops_half_way_says_how_far_it_came() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let taken = bytes.len().min(self.0);
                self.0 -= taken;
                if taken == 0 { Err(io::Error::from(ErrorKind::StorageFull)) } else { Ok(taken) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (written, error) = write_fully(&mut Full(7), b"0123456789");
        assert_eq!((written, error.unwrap().kind()), (7, ErrorKind::StorageFull));
    }

    #[test]
    fn a_directory_is_refused() {
        assert!(Appender::open(&std::env::temp_dir()).is_err());
    }
}
