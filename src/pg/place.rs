//! Which database of which server a session leads to.
//!
//! The rule: it is asked of the server, never guessed from addresses. The failure this prevents: two URLs that are both answered and lead
//! to different databases, so that rows are stored in one and looked for in the other.

use tokio_postgres::Client;

use super::statement::doctor as sql;

/// What is at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) database: String,
    pub(crate) database_id: String,
    pub(crate) standby: bool,
    /// When the server started, in microseconds since 1970.
    pub(crate) started: i64,
    /// The cluster's own number; unknown where only administrators may see it.
    pub(crate) system: Option<String>,
}

impl Place {
    /// Asks where this session leads to. Through a pooler too.
    pub(crate) async fn ask(client: &Client) -> Result<Self, tokio_postgres::Error> {
        let row = client.query_typed_one(sql::IDENTITY, &[]).await?;
        let system = match client.query_typed_one(sql::SYSTEM, &[]).await {
            Ok(row) => row.try_get(0)?,
            // Not everybody may see it.
            Err(_) => None,
        };
        Ok(Self {
            database: row.try_get(0)?,
            database_id: row.try_get(1)?,
            standby: row.try_get(2)?,
            started: row.try_get(3)?,
            system,
        })
    }

    /// Where `direct` leads to instead of here, for a sentence that begins with "the direct URL leads to". `None`: to the same place.
    pub(crate) fn instead(&self, direct: &Self) -> Option<String> {
        let other_cluster = match (&self.system, &direct.system) {
            (Some(one), Some(other)) => one != other,
            _ => false,
        };
        if !other_cluster && direct.standby && !self.standby {
            Some("a standby of the database's server".to_owned())
        } else if other_cluster || self.started != direct.started {
            Some("another server than the database URL".to_owned())
        } else if self.database_id != direct.database_id {
            Some(format!("database {:?} instead of {:?}", direct.database, self.database))
        } else {
            None
        }
    }
}
