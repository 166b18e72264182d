//! Passwords in database addresses, taken out of everything that is shown.
//!
//! The rule: no text leaves this program before it went through [`scrub`]. Errors and usage messages repeat what they complain about,
//! and what they complain about may be an address with a password in it.

use std::io::{self, Write};

/// What stands in for a password.
const HIDDEN: &str = "***";

/// The text with the passwords of addresses (`scheme://user:password@host`) and of key-value settings (`password=…`) hidden.
pub(super) fn scrub(text: &str) -> String {
    hide_settings(&hide_addresses(text))
}

fn hide_addresses(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("://").map(|at| at + 3) {
        shown.push_str(&rest[..start]);
        rest = &rest[start..];
        let address = &rest
            [..rest.find(|c: char| c.is_whitespace() || matches!(c, '\'' | '"' | '`')).unwrap_or(rest.len())];
        // The last @ ends the user part, even when a careless password has one itself.
        if let Some(at) = address.rfind('@')
            && let Some(colon) = address[..at].find(':')
        {
            shown.push_str(&rest[..=colon]);
            shown.push_str(HIDDEN);
            rest = &rest[at..];
        }
    }
    shown.push_str(rest);
    shown
}

fn hide_settings(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    // Neither name grows or shrinks in lower case, so places found there are places here.
    while let Some(start) = find_setting(rest) {
        shown.push_str(&rest[..start]);
        shown.push_str(HIDDEN);
        rest = &rest[start..];
        let end = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.find('\'').map_or(rest.len(), |end| end + 2),
            None => rest
                .find(|c: char| c.is_whitespace() || matches!(c, '&' | '\'' | '"' | '`'))
                .unwrap_or(rest.len()),
        };
        rest = &rest[end..];
    }
    shown.push_str(rest);
    shown
}

/// Where the value of the next `password = …` begins.
fn find_setting(text: &str) -> Option<usize> {
    let name = "password";
    let mut from = 0;
    while let Some(found) = text[from..].to_ascii_lowercase().find(name) {
        let after = from + found + name.len();
        let rest = text[after..].trim_start();
        if let Some(value) = rest.strip_prefix('=') {
            let value = value.trim_start();
            return (!value.is_empty()).then(|| text.len() - value.len());
        }
        from = after;
    }
    None
}

/// Standard error, scrubbed; for the log, which hands over one whole event with each write.
pub(super) struct ScrubbedStderr;

impl Write for ScrubbedStderr {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(scrub(&String::from_utf8_lossy(event)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::scrub;

    #[test]
    fn passwords_are_hidden_in_every_form_of_an_address() {
        for (text, shown) in [
            ("no secret here", "no secret here"),
            ("at https://example.org:80/x", "at https://example.org:80/x"),
            ("to postgres://me:se:cr@et@host:5432/db failed", "to postgres://me:***@host:5432/db failed"),
            (
                "'postgresql://me:secret@/db?host=/x', again postgres://a:b@c",
                "'postgresql://me:***@/db?host=/x', again postgres://a:***@c",
            ),
            ("postgres://me@host/db?password=secret&x=1", "postgres://me@host/db?password=***&x=1"),
            ("host=h password=secret user=u", "host=h password=*** user=u"),
            ("host=h PASSWORD = 'a secret' user=u", "host=h PASSWORD = *** user=u"),
            ("password authentication failed", "password authentication failed"),
            ("no password, password=", "no password, password="),
            ("ü password=ü", "ü password=***"),
        ] {
            assert_eq!(scrub(text), shown);
        }
    }
}
