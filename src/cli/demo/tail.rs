//! The output file, read while it grows.
//!
//! The rule: only whole lines count, and what stands after the last line end is read anew each time: it may still be on its way, or it is
//! the torn line of a killed writer, which the next writer cuts off and overwrites. Bytes kept of it would be glued to another line.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::ledger::Delivery;

/// Bytes of one look at least. At most a few megabytes at a time, so that others get a turn.
const AT_ONCE: usize = 4 * 1024 * 1024;

/// A reader that continues where it stopped.
#[derive(Debug)]
pub(super) struct Tail {
    file: File,
    /// The end of the last whole line.
    offset: u64,
    buffer: Vec<u8>,
    lines: u64,
}

impl Tail {
    pub(super) fn new(file: File) -> Self {
        Self { file, offset: 0, buffer: vec![0; AT_ONCE], lines: 0 }
    }

    /// Hands on every line that came since the last call. `true` when there may be more.
    pub(super) fn read(&mut self, mut deliver: impl FnMut(&Delivery)) -> io::Result<bool> {
        let read = self.fill()?;
        let bytes = &self.buffer[..read];
        let mut start = 0;
        while let Some(length) = bytes[start..].iter().position(|byte| *byte == b'\n') {
            self.lines += 1;
            let line = &bytes[start..start + length];
            let delivery = serde_json::from_slice(line).map_err(|e| {
                let text = String::from_utf8_lossy(&line[..line.len().min(80)]);
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("line {} of the relayed output: {e}: {text}", self.lines),
                )
            })?;
            deliver(&delivery);
            start += length + 1;
        }
        self.offset += start as u64;
        let full = read == self.buffer.len();
        if full && start == 0 {
            // A line that is longer than the buffer.
            self.buffer.resize(2 * read, 0);
        }
        Ok(full)
    }

    /// Reads from the last line end on, as much as there is room for.
    fn fill(&mut self) -> io::Result<usize> {
        let mut read = 0;
        while read < self.buffer.len() {
            match self.file.read_at(&mut self.buffer[read..], self.offset + read as u64)? {
                0 => break,
                more => read += more,
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_line_counts_when_it_is_whole() {
        let mut written = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::new(written.reopen().unwrap());
        let mut seen = 0;
        let id = "00000000-0000-0000-0000-000000000001";
        let line = format!(
            r#"{{"message_id":"{id}","stream_id":null,"instance_id":"{id}","claim_epoch":1,"payload":{{"a":[1]}}}}"#
        );
        write!(written, "{line}\n{}", &line[..30]).unwrap();
        tail.read(|_| seen += 1).unwrap();
        assert_eq!(seen, 1);
        writeln!(written, "{}", &line[30..]).unwrap();
        tail.read(|_| seen += 1).unwrap();
        assert_eq!(seen, 2);
        writeln!(written, "torn").unwrap();
        assert!(tail.read(|_| seen += 1).unwrap_err().to_string().contains("line 3"));
    }

    #[test]
    fn the_torn_line_of_a_killed_writer_that_is_overwritten_is_ignored() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::new(written.reopen().unwrap());
        let line = |n: u64| {
            let id = uuid::Uuid::from_u128(n.into());
            format!(
                r#"{{"message_id":"{id}","stream_id":null,"instance_id":"{id}","claim_epoch":1,"attempts":1}}"#
            )
        };
        let mut seen = Vec::new();
        let mut look = |tail: &mut Tail| {
            tail.read(|delivery| seen.push(delivery.message_id.as_u128())).unwrap();
            seen.clone()
        };
        let file = written.as_file();
        let whole = format!("{}\n", line(1));
        file.write_all_at(format!("{whole}{}", &line(2)[..25]).as_bytes(), 0).unwrap();
        assert_eq!(look(&mut tail), [1]);
        file.set_len(whole.len() as u64).unwrap();
        file.write_all_at(format!("{}\n{}\n", line(3), line(2)).as_bytes(), whole.len() as u64).unwrap();
        assert_eq!(look(&mut tail), [1, 3, 2]);
    }

    #[test]
    fn a_line_longer_than_the_buffer_comes_whole() {
        let mut written = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::new(written.reopen().unwrap());
        let id = uuid::Uuid::nil();
        let long = "x".repeat(2 * AT_ONCE);
        writeln!(written, r#"{{"message_id":"{id}","stream_id":null,"instance_id":"{id}","claim_epoch":1,"payload":"{long}"}}"#)
            .unwrap();
        let mut seen = 0;
        while tail.read(|_| seen += 1).unwrap() {}
        assert_eq!(seen, 1);
    }
}
