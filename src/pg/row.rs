//! Columns to values, checked. The failure this prevents: a row that is half understood.

use std::error::Error;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;
use workpump_actors::work::{Category, ClaimEpoch, ClaimedWork, WorkId, WorkKey};

/// The text of a `jsonb` column, as the server sends it: never parsed on the way to the handler.
struct JsonText(Bytes);

impl<'a> FromSql<'a> for JsonText {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        match raw.split_first() {
            Some((1, text)) => Ok(Self(Bytes::copy_from_slice(text))),
            Some((version, _)) => Err(format!("jsonb format {version} is unknown to this library").into()),
            None => Err("empty jsonb value".into()),
        }
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB
    }
}

/// An instant as the server counts it, in microseconds: handed back exactly as it came, whatever the local clock can express.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamp(pub(crate) i64);

impl<'a> FromSql<'a> for Timestamp {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(i64::from_sql(&Type::INT8, raw)?))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

impl ToSql for Timestamp {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        self.0.to_sql(&Type::INT8, out)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

/// Names repeat from row to row: one allocation serves them all.
#[derive(Default)]
struct Interned(Vec<Arc<str>>);

impl Interned {
    const REMEMBERED: usize = 16;

    fn get(&mut self, name: Option<&str>) -> Option<Arc<str>> {
        let name = name?;
        if let Some(known) = self.0.iter().find(|known| &***known == name) {
            return Some(Arc::clone(known));
        }
        let fresh: Arc<str> = name.into();
        if self.0.len() < Self::REMEMBERED {
            self.0.push(Arc::clone(&fresh));
        }
        Some(fresh)
    }
}

/// The rows of a claim, in order of arrival inside each category.
pub(crate) fn claimed(rows: &[Row]) -> Result<Vec<ClaimedWork>, tokio_postgres::Error> {
    let mut names = Interned::default();
    let mut works = rows.iter().map(|row| claimed_row(row, &mut names)).collect::<Result<Vec<_>, _>>()?;
    works.sort_unstable_by_key(|work| (work.key.category, work.seq));
    Ok(works)
}

fn claimed_row(row: &Row, names: &mut Interned) -> Result<ClaimedWork, tokio_postgres::Error> {
    let payload: Option<JsonText> = row.try_get(12)?;
    let metadata: Option<JsonText> = row.try_get(13)?;
    Ok(ClaimedWork {
        key: key(row.try_get(0)?, row.try_get(1)?),
        stream_id: row.try_get(2)?,
        partition: row.try_get(3)?,
        epoch: ClaimEpoch(row.try_get(4)?),
        attempts: row.try_get::<_, i32>(5)?.unsigned_abs(),
        crash_count: row.try_get::<_, i32>(6)?.unsigned_abs(),
        lease_expiry: row.try_get::<_, SystemTime>(7)?,
        seq: row.try_get(8)?,
        name: names.get(row.try_get(9)?),
        message_type: names.get(row.try_get(10)?),
        event_id: row.try_get(11)?,
        payload: payload.map_or_else(Bytes::new, |text| text.0),
        metadata: metadata.map(|text| text.0),
    })
}

/// A key from its columns. The server only ever sends the four names it was asked for.
pub(crate) fn key(category: &str, id: Uuid) -> WorkKey {
    let category = Category::parse(category).unwrap_or(Category::Outbox);
    WorkKey { category, id: WorkId(id) }
}
