//! Statements as the product sends them: unnamed and typed, for tests that write `query(sql, &[&a, &b])`.
//!
//! The driver's own `query` leaves a named statement behind in the session, and a pooler in transaction mode gives the next statement
//! another session. So the types are asked of the values themselves: the first type that a value agrees to be written as is its own.

use bytes::BytesMut;
use tokio_postgres::types::{ToSql, Type};

/// A parameter of a statement.
pub type Parameter<'a> = &'a (dyn ToSql + Sync);

/// What tests send. A value of a type that is missing here panics with a list of these.
const KNOWN: [Type; 16] = [
    Type::BOOL,
    Type::INT4,
    Type::INT8,
    Type::FLOAT8,
    Type::TEXT,
    Type::UUID,
    Type::TIMESTAMPTZ,
    Type::JSONB,
    Type::BOOL_ARRAY,
    Type::INT4_ARRAY,
    Type::INT8_ARRAY,
    Type::FLOAT8_ARRAY,
    Type::TEXT_ARRAY,
    Type::UUID_ARRAY,
    Type::TIMESTAMPTZ_ARRAY,
    Type::JSONB_ARRAY,
];

/// The parameters with their types.
pub fn typed<'a>(parameters: &'a [Parameter<'a>]) -> Vec<(Parameter<'a>, Type)> {
    parameters.iter().map(|value| (*value, type_of(*value))).collect()
}

fn type_of(value: Parameter<'_>) -> Type {
    let mut bytes = BytesMut::new();
    let found = KNOWN.iter().find(|known| value.to_sql_checked(known, &mut bytes).is_ok());
    found
        .unwrap_or_else(|| panic!("{value:?} is none of {KNOWN:?}: add its type to tests/common/typed.rs"))
        .clone()
}
