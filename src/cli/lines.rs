//! JSON lines, read by the rule that one bad line costs one line.
//!
//! The rule: nothing that a line contains may end the reading or touch its neighbours. A line that is no UTF-8, no JSON or too long
//! is handed on with its number and the reason, and the next one follows. Only a failing read ends it. Lines come in batches: what is
//! already there is not held back for what is not, so that `tail -f … | workpump enqueue` stores each line as it appears.

use std::io::{self, BufRead, BufReader, Read};

use tokio::sync::mpsc;

/// A line longer than this is refused without being held in memory; PostgreSQL's jsonb takes no more either.
const LONGEST: usize = 256 * 1024 * 1024;
/// Rows of one transaction.
const BATCH_ROWS: usize = 1_000;
/// Bytes of one transaction; a single longer line makes a batch of its own.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Read at once: what counts as "already there".
const BUFFER: usize = 1024 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// One line, or one message made from it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry<T> {
    /// Counted from 1, as editors do.
    pub(super) line: u64,
    /// Its length in the input.
    pub(super) bytes: usize,
    /// What it says, or why it is refused.
    pub(super) value: Result<T, String>,
}

/// Where entries come from.
pub(super) trait Source<T>: Send + 'static {
    /// The next entry; `None` at the end.
    fn next_entry(&mut self) -> Option<io::Result<Entry<T>>>;
    /// Whether the next entry can be had without waiting.
    fn at_hand(&self) -> bool;
}

/// The lines of a file or a pipe, each turned into a `T`.
pub(super) struct Lines<R, F> {
    reader: BufReader<R>,
    parse: F,
    number: u64,
    longest: usize,
}

impl<R: Read, F> Lines<R, F> {
    pub(super) fn new(reader: R, parse: F) -> Self {
        Self { reader: BufReader::with_capacity(BUFFER, reader), parse, number: 0, longest: LONGEST }
    }

    /// The next line without its end; `None` at the end of the input. The second value is its length in the input.
    fn read_line(&mut self) -> io::Result<Option<(Result<String, String>, usize)>> {
        let (mut line, mut bytes) = (Vec::new(), 0);
        loop {
            let there = match self.reader.fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            let end = there.iter().position(|byte| *byte == b'\n');
            let part = &there[..end.unwrap_or(there.len())];
            if bytes + part.len() <= self.longest {
                line.extend_from_slice(part);
            }
            let used = end.map_or(part.len(), |end| end + 1);
            bytes += used;
            self.reader.consume(used);
            if end.is_some() {
                break;
            }
            if used == 0 {
                if bytes == 0 {
                    return Ok(None);
                }
                break;
            }
        }
        self.number += 1;
        if bytes > self.longest.saturating_add(1) {
            let reason = format!("the line has {bytes} bytes, {} are allowed: split it", self.longest);
            return Ok(Some((Err(reason), bytes)));
        }
        Ok(Some((text(line, self.number == 1), bytes)))
    }
}

fn text(mut line: Vec<u8>, first: bool) -> Result<String, String> {
    if first && line.starts_with(BYTE_ORDER_MARK) {
        line.drain(..BYTE_ORDER_MARK.len());
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    String::from_utf8(line)
        .map_err(|e| format!("not UTF-8 from byte {} on", e.utf8_error().valid_up_to() + 1))
}

impl<R, F, T> Source<T> for Lines<R, F>
where
    R: Read + Send + 'static,
    F: FnMut(String) -> Result<T, String> + Send + 'static,
    T: 'static,
{
    fn next_entry(&mut self) -> Option<io::Result<Entry<T>>> {
        loop {
            return match self.read_line() {
                Err(e) => Some(Err(e)),
                Ok(None) => None,
                // An empty line says nothing; that is no mistake.
                Ok(Some((Ok(text), _))) if text.trim().is_empty() => continue,
                Ok(Some((text, bytes))) => {
                    let value = text.and_then(&mut self.parse);
                    Some(Ok(Entry { line: self.number, bytes, value }))
                }
            };
        }
    }

    fn at_hand(&self) -> bool {
        self.reader.buffer().contains(&b'\n')
    }
}

/// What is wrong with a line, in serde's words: with the column, but without the line that it counts inside the line.
pub(super) fn json_fault(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    if error.is_data() { what.to_owned() } else { format!("not JSON: {what} at column {}", error.column()) }
}

/// Reads on a thread of its own, because a pipe may keep a read waiting for ever; the thread ends with the receiver or the input.
pub(super) fn in_batches<T: Send + 'static>(
    mut source: Box<dyn Source<T>>,
) -> mpsc::Receiver<io::Result<Vec<Entry<T>>>> {
    let (send, batches) = mpsc::channel(2);
    std::thread::spawn(move || {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some(next) = source.next_entry() {
            let failed = next.is_err();
            match next {
                Ok(entry) => {
                    bytes += entry.bytes;
                    batch.push(entry);
                }
                Err(e) => {
                    // What was read before the failure is stored all the same.
                    if !batch.is_empty() && send.blocking_send(Ok(std::mem::take(&mut batch))).is_err() {
                        return;
                    }
                    drop(send.blocking_send(Err(e)));
                }
            }
            if failed {
                return;
            }
            if batch.len() >= BATCH_ROWS || bytes >= BATCH_BYTES || !source.at_hand() {
                bytes = 0;
                if send.blocking_send(Ok(std::mem::take(&mut batch))).is_err() {
                    return;
                }
            }
        }
        if !batch.is_empty() {
            drop(send.blocking_send(Ok(batch)));
        }
    });
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8]) -> Vec<(u64, Result<String, String>)> {
        let mut lines = Lines::new(io::Cursor::new(input.to_vec()), Ok::<String, String>);
        lines.longest = 10;
        std::iter::from_fn(|| lines.next_entry())
            .map(Result::unwrap)
            .map(|entry| (entry.line, entry.value))
            .collect()
    }

    #[test]
    fn line_ends_and_a_byte_order_mark_are_no_content_and_empty_lines_are_counted_but_not_handed_on() {
        let lines = read(b"\xef\xbb\xbf1\r\n\r\n \t\n2\n3");
        assert_eq!(lines, [(1, Ok("1".into())), (4, Ok("2".into())), (5, Ok("3".into()))]);
    }

    #[test]
    fn a_line_that_is_no_text_is_refused_alone() {
        let lines = read(b"1\nab\xff\n2\n");
        assert_eq!(lines[1], (2, Err("not UTF-8 from byte 3 on".into())));
        assert_eq!(lines[2], (3, Ok("2".into())));
    }

    #[test]
    fn a_line_that_is_too_long_is_refused_alone() {
        let lines = read(b"0123456789\n01234567890\n\xf0\n0123456789");
        assert_eq!(lines[0], (1, Ok("0123456789".into())));
        assert_eq!(lines[1].1.as_ref().unwrap_err(), "the line has 12 bytes, 10 are allowed: split it");
        assert_eq!(lines[3], (4, Ok("0123456789".into())));
    }

    #[test]
    fn what_is_there_is_not_held_back_for_what_is_not() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut batches = in_batches(Box::new(Lines::new(reader, Ok::<String, String>)));
        io::Write::write_all(&mut writer, b"1\n2\n").unwrap();
        let first = batches.blocking_recv().unwrap().unwrap();
        assert_eq!(first.len(), 2);
        drop(writer);
        assert!(batches.blocking_recv().is_none());
    }

    #[test]
    fn a_failing_read_keeps_what_came_before_it() {
        struct Failing(bool);
        impl Read for Failing {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                if std::mem::replace(&mut self.0, true) {
                    return Err(io::Error::other("the disk is gone"));
                }
                buf[..2].copy_from_slice(b"1\n");
                Ok(2)
            }
        }
        let mut batches = in_batches(Box::new(Lines::new(Failing(false), Ok::<String, String>)));
        assert_eq!(batches.blocking_recv().unwrap().unwrap().len(), 1);
        assert!(batches.blocking_recv().unwrap().is_err());
        assert!(batches.blocking_recv().is_none());
    }
}
