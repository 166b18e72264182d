//! Whether a notification sent by the database URL is heard by the direct session: a real one, with a word nobody else sends.

use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::types::Type;
use uuid::Uuid;
use workpump_actors::port::NotificationStream;

use super::ask::{NoAnswer, Patient};
use super::finding::{Check, Finding, Group};
use crate::pg::statement::direct as sql;

const NOTIFY: Check = Check(Group::Connections, "connections.notify");
/// How long one is waited for.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The limit for each of the two statements.
const STATEMENT: Duration = Duration::from_secs(2);

/// What became of it.
pub(super) type Heard = Result<bool, NoAnswer>;

/// Listens on one session and rings by the other.
pub(super) async fn ring(database: &Patient, direct: &Patient, heard: &mut NotificationStream) -> Heard {
    let (channel, word) =
        (format!("workpump_doctor_{}", Uuid::now_v7().simple()), Uuid::now_v7().to_string());
    let listen = sql::listen(std::slice::from_ref(&channel));
    direct.within(STATEMENT, direct.client().batch_execute(&listen)).await?;
    let params = [(&channel as _, Type::TEXT), (&word as _, Type::TEXT)];
    database.within(STATEMENT, database.client().execute_typed(sql::NOTIFY, &params)).await?;
    let awaited = async {
        while let Some(rung) = heard.recv().await {
            if rung.channel == channel && rung.payload == word {
                return true;
            }
        }
        false
    };
    Ok(timeout(HEARD_WITHIN, awaited).await.unwrap_or(false))
}

/// What that means.
pub(super) fn judge(heard: &Heard) -> Finding {
    match heard {
        Ok(true) => NOTIFY.ok("a notification sent by the database URL was heard on the direct session"),
        Ok(false) => NOTIFY
            .error(
                format!("a notification sent by the database URL was not heard within {} s on the direct session", HEARD_WITHIN.as_secs()),
                "nobody is woken when work arrives: it waits for the next poll, up to 10 s",
            )
            .next("see connections.same_database and activity.notification_queue; both URLs have to lead to one database"),
        Err(reason) => NOTIFY.not_made(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[test]
    fn silence_is_an_error_and_not_asking_is_none_of_both() {
        assert_eq!(judge(&Ok(true)).severity, Severity::Ok);
        assert_eq!(judge(&Ok(false)).severity, Severity::Error);
        assert_eq!(judge(&Err(NoAnswer::new("x"))).severity, Severity::Warning);
    }
}
