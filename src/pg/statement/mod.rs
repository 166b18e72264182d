//! SQL text. No other place in the library holds any.

pub(crate) mod migrate;
