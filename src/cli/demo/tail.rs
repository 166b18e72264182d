//! The output file, read while it grows.
//!
//! The rule: only whole lines count. What stands after the last line end may still be on its way, or be cut off again.

use std::fs::File;
use std::io::{self, Read};

use super::ledger::Delivery;

/// A reader that continues where it stopped.
#[derive(Debug)]
pub(super) struct Tail {
    file: File,
    rest: Vec<u8>,
    lines: u64,
}

impl Tail {
    pub(super) fn new(file: File) -> Self {
        Self { file, rest: Vec::new(), lines: 0 }
    }

    /// Hands on every line that came since the last call. At most a few megabytes at a time, so that others get a turn; `true` when
    /// there is more.
    pub(super) fn read(&mut self, mut deliver: impl FnMut(&Delivery)) -> io::Result<bool> {
        const AT_ONCE: u64 = 4 * 1024 * 1024;
        let read = (&mut self.file).take(AT_ONCE).read_to_end(&mut self.rest)?;
        let mut start = 0;
        while let Some(length) = self.rest[start..].iter().position(|byte| *byte == b'\n') {
            self.lines += 1;
            let line = &self.rest[start..start + length];
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
        self.rest.drain(..start);
        Ok(read as u64 == AT_ONCE)
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
}
