//! What the demo stores: the lines of a file, or orders of its own making.
//!
//! The rule: a line's stream is the text of its key, nothing else. The stream id is the UUIDv5 of that text in the namespace
//! [`Uuid::NAMESPACE_OID`], so anybody can compute it again; the text itself travels in `metadata.stream_key`, and the message's place
//! in its stream in `metadata.position`, by which the order is checked afterwards.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::value::RawValue;
use uuid::Uuid;

use crate::cli::lines::json_fault;

/// One message before it is stored.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) message_type: &'static str,
    /// The text that names the stream; `None` = no stream, no order.
    pub(super) stream_key: Option<String>,
    pub(super) payload: Box<RawValue>,
}

/// The id of the stream that a key names.
pub(super) fn stream_id(key: &str) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_OID, key.as_bytes())
}

/// Turns a line of the input into a message.
pub(super) fn draft(line: String, stream_key: Option<&str>) -> Result<Draft, String> {
    let payload = RawValue::from_string(line).map_err(|e| json_fault(&e))?;
    let stream_key = stream_key.map(|field| key_of(&payload, field)).transpose()?;
    Ok(Draft { message_type: "demo.line", stream_key, payload })
}

/// The text of the value at `field`, whose dots lead into nested objects unless a field has that very name.
fn key_of(value: &RawValue, field: &str) -> Result<String, String> {
    let missing = || format!("no field {field:?}, which --stream-key names");
    let top = members(value)
        .ok_or_else(|| format!("not an object, so it has no field {field:?}, which --stream-key names"))?;
    let found = match top.get(field) {
        Some(found) => *found,
        None => field
            .split('.')
            .try_fold(value, |at, name| members(at)?.get(name).copied())
            .ok_or_else(missing)?,
    };
    let text = found.get();
    match text.as_bytes().first() {
        Some(b'"') => serde_json::from_str(text)
            .map_err(|e| format!("the key {field:?} is not text: {}", json_fault(&e))),
        // The digits as they stand: as a float, long numbers would fall together.
        Some(b'-' | b'0'..=b'9' | b't' | b'f') => Ok(text.to_owned()),
        Some(b'n') => Err(format!("the key {field:?} is null; it must be a string, a number or a boolean")),
        Some(b'[') => {
            Err(format!("the key {field:?} is an array; it must be a string, a number or a boolean"))
        }
        _ => Err(format!("the key {field:?} is an object; it must be a string, a number or a boolean")),
    }
}

/// The members of an object, unparsed; of equal names the last counts, as in PostgreSQL.
fn members(value: &RawValue) -> Option<HashMap<Cow<'_, str>, &RawValue>> {
    serde_json::from_str(value.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(line: &str, field: &str) -> Result<String, String> {
        draft(line.to_owned(), Some(field)).map(|draft| draft.stream_key.unwrap())
    }

    #[test]
    fn the_key_is_found_in_nested_objects_and_under_a_dotted_name() {
        assert_eq!(key(r#"{"a":{"b":{"c":"x"}}}"#, "a.b.c").unwrap(), "x");
        assert_eq!(key(r#"{"a.b":"flat","a":{"b":"deep"}}"#, "a.b").unwrap(), "flat");
        assert_eq!(key(r#"{"\u0061":"escaped name"}"#, "a").unwrap(), "escaped name");
        assert_eq!(key(r#"{"a":1,"a":2}"#, "a").unwrap(), "2");
    }

    #[test]
    fn keys_keep_their_exact_text() {
        assert_eq!(key(r#"{"k":"ключ \u00e9 🦀"}"#, "k").unwrap(), "ключ é 🦀");
        assert_eq!(key(r#"{"k":123456789012345678901}"#, "k").unwrap(), "123456789012345678901");
        assert_eq!(key(r#"{"k":-1.50}"#, "k").unwrap(), "-1.50");
        assert_eq!(key(r#"{"k":true}"#, "k").unwrap(), "true");
        assert_eq!(key(r#"{"k":""}"#, "k").unwrap(), "");
    }

    #[test]
    fn a_line_without_a_usable_key_is_refused_with_the_reason() {
        for (line, reason) in [
            (r#"{"a":1}"#, "no field \"k\""),
            (r#"{"k":null}"#, "is null"),
            (r#"{"k":[1]}"#, "is an array"),
            (r#"{"k":{}}"#, "is an object"),
            ("17", "not an object"),
            ("{\"k\":1", "not JSON: EOF while parsing"),
            ("{\"k\":1} x", "not JSON: trailing characters"),
            (r#"{"k":"\ud800"}"#, "is not text"),
        ] {
            let refused = key(line, "k").unwrap_err();
            assert!(refused.contains(reason), "{line}: {refused}");
            assert!(!refused.contains(" line "), "{refused}");
        }
    }

    #[test]
    fn without_a_key_any_json_value_will_do() {
        for line in ["1", "null", "\"text\"", "[]", r#"{"deep":[[[[]]]]}"#] {
            assert!(draft(line.to_owned(), None).unwrap().stream_key.is_none());
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert!(draft(deep, None).is_ok(), "depth is for the database to judge");
    }
}
