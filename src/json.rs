//! Whether PostgreSQL can store a JSON text. The rule: what `jsonb` would refuse is refused here, before the caller's transaction is
//! aborted by it, with the place and the reason.

/// Nesting deeper than this is refused: the server's parser recurses, and so do most readers.
const MAX_DEPTH: usize = 512;
/// `numeric` holds 131 072 digits before the point; a longer exponent is surely beyond.
const MAX_EXPONENT: u64 = 100_000;

/// Why a JSON text cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// `\u0000` in a string or key.
    #[error("byte {at}: the text contains \\u0000, which PostgreSQL cannot store")]
    Nul {
        /// Offset in bytes.
        at: usize,
    },
    /// Half of a surrogate pair.
    #[error("byte {at}: the text contains half of a surrogate pair, which is no character")]
    LoneSurrogate {
        /// Offset in bytes.
        at: usize,
    },
    /// Too many nested arrays and objects.
    #[error("byte {at}: more than 512 nested arrays and objects")]
    TooDeep {
        /// Offset in bytes.
        at: usize,
    },
    /// A number beyond what `numeric` can hold.
    #[error("byte {at}: the exponent of a number is beyond what PostgreSQL can store")]
    NumberTooLarge {
        /// Offset in bytes.
        at: usize,
    },
}

/// Checks a text that is known to be JSON.
pub(crate) fn check_storable(text: &str) -> Result<(), JsonError> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at = check_string(bytes, at + 1)?;
                continue;
            }
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(JsonError::TooDeep { at });
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'e' | b'E' if at > 0 && bytes[at - 1].is_ascii_digit() => check_exponent(bytes, at)?,
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// From behind the opening quote to behind the closing one.
fn check_string(bytes: &[u8], start: usize) -> Result<usize, JsonError> {
    let mut at = start;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => return Ok(at + 1),
            b'\\' if bytes.get(at + 1) == Some(&b'u') => match escape(bytes, at) {
                Some(0) => return Err(JsonError::Nul { at }),
                Some(0xD800..=0xDBFF) => match escape(bytes, at + 6) {
                    Some(0xDC00..=0xDFFF) => at += 12,
                    _ => return Err(JsonError::LoneSurrogate { at }),
                },
                Some(0xDC00..=0xDFFF) => return Err(JsonError::LoneSurrogate { at }),
                _ => at += 6,
            },
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    Ok(at)
}

/// The code unit of `\uXXXX` at this place, if that is what stands there.
fn escape(bytes: &[u8], at: usize) -> Option<u32> {
    let text = bytes.get(at..at + 6)?;
    let digits = text.strip_prefix(b"\\u")?;
    u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn check_exponent(bytes: &[u8], at: usize) -> Result<(), JsonError> {
    let digits = bytes[at + 1..]
        .iter()
        .skip_while(|byte| matches!(byte, b'+' | b'-'))
        .take_while(|byte| byte.is_ascii_digit());
    let exponent =
        digits.fold(0_u64, |value, digit| value.saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    if exponent > MAX_EXPONENT { Err(JsonError::NumberTooLarge { at }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::{JsonError, check_storable};

    #[test]
    fn what_jsonb_refuses_is_refused_with_its_place() {
        assert_eq!(check_storable(r#"{"a":"x\u0000"}"#), Err(JsonError::Nul { at: 7 }));
        assert_eq!(check_storable(r#"{"\u0000":1}"#), Err(JsonError::Nul { at: 2 }));
        assert_eq!(check_storable(r#"["\ud800"]"#), Err(JsonError::LoneSurrogate { at: 2 }));
        assert_eq!(check_storable(r#"["\ud800\ud800"]"#), Err(JsonError::LoneSurrogate { at: 2 }));
        assert_eq!(check_storable(r#"["\udc00"]"#), Err(JsonError::LoneSurrogate { at: 2 }));
        assert_eq!(check_storable("[1e999999999999999999999]"), Err(JsonError::NumberTooLarge { at: 2 }));
        assert!(matches!(check_storable(&"[".repeat(513)), Err(JsonError::TooDeep { at: 512 })));
    }

    #[test]
    fn what_only_looks_like_it_is_let_through() {
        for text in [
            r#"{"a":"\\u0000"}"#,
            r#""\ud83d\ude00""#,
            r#""\u00e9 e9e9""#,
            r#"{"e":1e10,"E":-2E-5,"text":"1e999999999"}"#,
            r#""\"\u0041""#,
            &("[".repeat(512) + &"]".repeat(512)),
        ] {
            assert_eq!(check_storable(text), Ok(()), "{text}");
        }
    }
}
