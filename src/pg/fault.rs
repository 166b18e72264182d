//! From driver errors to the engine's and the user's. The rule: an error says whether asking again can help, names what the server
//! said, and never shows a password.

use tokio_postgres::error::SqlState;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::StoreError;

use super::session::OpenError;

/// The server's own words, with its SQLSTATE and hint; for other errors the driver's, with their causes.
pub(crate) fn describe(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        let hint = server.hint().map(|hint| format!(", {hint}")).unwrap_or_default();
        return format!("{} ({}){hint}", server.message(), server.code().code());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// What an error means for a call made on behalf of `instance`.
pub(crate) fn store_error(error: &tokio_postgres::Error, instance: InstanceId) -> StoreError {
    let text = describe(error);
    let Some(code) = error.code() else {
        return if error.is_closed()
            || std::error::Error::source(error)
                .is_some_and(|cause| cause.downcast_ref::<std::io::Error>().is_some())
        {
            StoreError::Unavailable(text)
        } else {
            StoreError::Other { code: "client".to_owned(), message: text }
        };
    };
    match code.code() {
        "WH001" => StoreError::Evicted(instance),
        "WH003" => StoreError::NotRegistered(instance),
        "WH004" => StoreError::Schema(text),
        "WH002" => StoreError::Rejected { code: code.code().to_owned(), message: text },
        _ if *code == SqlState::UNDEFINED_TABLE
            || *code == SqlState::UNDEFINED_FUNCTION
            || *code == SqlState::INVALID_SCHEMA_NAME =>
        {
            StoreError::Schema(text)
        }
        _ if is_contended(code) => StoreError::Contended(text),
        _ if is_unavailable(code) => StoreError::Unavailable(text),
        code if code.starts_with("22") || code.starts_with("23") => {
            StoreError::Rejected { code: code.to_owned(), message: text }
        }
        code => StoreError::Other { code: code.to_owned(), message: text },
    }
}

/// What it means that no session could be opened for `instance`.
pub(crate) fn open_error(error: &OpenError, instance: InstanceId) -> StoreError {
    match error {
        OpenError::Late => StoreError::Unavailable(error.to_string()),
        OpenError::Refused(error) => store_error(error, instance),
        OpenError::NotDirect(why) => StoreError::NotDirect(why.clone()),
    }
}

fn is_contended(code: &SqlState) -> bool {
    *code == SqlState::T_R_DEADLOCK_DETECTED
        || *code == SqlState::T_R_SERIALIZATION_FAILURE
        || *code == SqlState::LOCK_NOT_AVAILABLE
        || *code == SqlState::QUERY_CANCELED
}

/// Connection trouble, shutdown, start-up, recovery, too many clients, out of memory or disk: all pass by themselves or with help.
fn is_unavailable(code: &SqlState) -> bool {
    let code = code.code();
    code.starts_with("08")
        || code.starts_with("53")
        || code.starts_with("57P")
        || code.starts_with("58")
        || code == "25006"
}
