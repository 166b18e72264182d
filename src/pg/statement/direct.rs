//! The direct session: what it asks of the server, how it proves itself, the alive-lock, notifications.

use std::fmt::Write as _;

use crate::pg::schema_name::SchemaName;

/// The setting that only shows back when the start-up options reached the server and were not answered by somebody in between.
pub(crate) const MARK: &str = "workpump.session";

/// Who is at the other end: its backend, whether it is reached through a Unix socket, the mark (`$1` its name) or null, and the settings
/// `$2` as they are in force, null for one it does not know.
pub(crate) const INTRODUCE: &str = "SELECT pg_catalog.pg_backend_pid(), pg_catalog.inet_client_addr() IS NULL, \
     pg_catalog.current_setting($1, true), \
     ARRAY(SELECT pg_catalog.current_setting(n.name, true) FROM pg_catalog.unnest($2) WITH ORDINALITY AS n (name, place) ORDER BY n.place)";

/// One round trip; names the backend, which is the same one for as long as the session is direct.
pub(crate) const PING: &str = "SELECT pg_catalog.pg_backend_pid()";

/// Takes the alive-lock of `$1` for this session; true when it is held here afterwards.
pub(crate) fn claim_alive_lock(schema: &SchemaName) -> String {
    format!("SELECT {}.claim_instance_alive_lock($1)", schema.identifier())
}

/// Gives the alive-lock of `$1` back; true when it was held here.
pub(crate) fn release_alive_lock(schema: &SchemaName) -> String {
    format!("SELECT {}.release_instance_alive_lock($1)", schema.identifier())
}

/// The channel of `$1`.
pub(crate) fn work_channel(schema: &SchemaName) -> String {
    format!("SELECT {}.wh_work_channel($1)", schema.identifier())
}

/// Hears the channels from now on.
pub(crate) fn listen(channels: &[String]) -> String {
    each("LISTEN", channels)
}

/// Hears the channels no more.
pub(crate) fn unlisten(channels: &[String]) -> String {
    each("UNLISTEN", channels)
}

fn each(command: &str, channels: &[String]) -> String {
    channels.iter().fold(String::new(), |mut text, channel| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{command} \"{}\";", channel.replace('"', "\"\""));
        text
    })
}

/// Rings the channel `$1` with `$2`.
pub(crate) const NOTIFY: &str = "SELECT pg_catalog.pg_notify($1, $2)::text";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_channels_are_quoted() {
        assert_eq!(listen(&["a".to_owned(), "b\"; drop".to_owned()]), "LISTEN \"a\";LISTEN \"b\"\"; drop\";");
        assert_eq!(unlisten(&["*".to_owned(), "b\"".to_owned()]), "UNLISTEN \"*\";UNLISTEN \"b\"\"\";");
        assert_eq!(listen(&[]), "");
    }
}
