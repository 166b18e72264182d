//! The embedded migrations, and the SQL of their runner.
//!
//! The rule: a migration that was released never changes; what changes behaviour is a new one. Its checksum in the ledger would refuse
//! the schema otherwise.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use crate::pg::schema_name::SchemaName;

/// One embedded migration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Migration {
    /// Its name in the ledger; names sort in the order of application.
    pub(crate) name: &'static str,
    /// The oldest library that may run on a schema with it.
    pub(crate) min_library: &'static str,
    sql: &'static str,
}

macro_rules! migration {
    ($name:literal, $min_library:literal) => {
        Migration {
            name: $name,
            min_library: $min_library,
            sql: include_str!(concat!("../../../migrations/", $name, ".sql")),
        }
    };
}

/// All migrations, oldest first.
pub(crate) const MIGRATIONS: &[Migration] = &[
    migration!("0010_tables", "0.1.0"),
    migration!("0030_claim", "0.1.0"),
    migration!("0040_settle", "0.1.0"),
    migration!("0045_renew", "0.1.0"),
    migration!("0050_heartbeat", "0.1.0"),
    migration!("0055_instance_alive_lock", "0.1.0"),
    migration!("0060_death_watch", "0.1.0"),
    migration!("0065_doorbells", "0.1.0"),
    migration!("0067_arm", "0.1.0"),
    migration!("0070_store", "0.1.0"),
];

impl Migration {
    /// SHA-256 of the text as it is embedded, in hexadecimal; line ends do not count, so that a checkout on Windows matches.
    pub(crate) fn checksum(&self) -> String {
        Sha256::digest(self.sql.replace("\r\n", "\n")).iter().fold(String::new(), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// The text for one schema. Each line is read once and comments are left alone: a schema's name is never read as a token, and one
    /// with a line end in it cannot break out of a comment.
    pub(crate) fn sql_for(&self, schema: &SchemaName) -> String {
        let (identifier, literal) = (schema.identifier(), schema.literal());
        let mut sql = String::with_capacity(self.sql.len() * 2);
        for line in self.sql.lines().filter(|line| !line.trim_start().starts_with("--")) {
            let mut rest = line;
            while let Some(at) = rest.find("@schema") {
                sql.push_str(&rest[..at]);
                let tail = &rest[at..];
                if let Some(after) = tail.strip_prefix("@schema@") {
                    sql.push_str(&identifier);
                    rest = after;
                } else if let Some(after) = tail.strip_prefix("@schema_text@") {
                    sql.push_str(&literal);
                    rest = after;
                } else {
                    sql.push_str("@schema");
                    rest = &tail["@schema".len()..];
                }
            }
            sql.push_str(rest);
            sql.push('\n');
        }
        sql
    }
}

/// The ledger's name as text, for `to_regclass`.
pub(crate) fn ledger_name(schema: &SchemaName) -> String {
    format!("{}.wh_schema_migrations", schema.identifier())
}

/// Whether the schema (`$1`) and the ledger (`$2`) exist. Asks for the schema first: `to_regclass` is an error without USAGE on it.
pub(crate) const EXISTS: &str = "select exists (select 1 from pg_catalog.pg_namespace n where n.nspname = $1), \
     pg_catalog.to_regclass($2) is not null";

/// Drops a schema and all that is in it.
pub(crate) fn drop_schema(schema: &SchemaName) -> String {
    format!("drop schema if exists {} cascade", schema.identifier())
}

/// The whole ledger.
pub(crate) fn read_ledger(schema: &SchemaName) -> String {
    format!("select name, checksum, min_library from {} order by name", ledger_name(schema))
}

/// For this transaction: names must be qualified, nobody is waited for without end, and a session whose client is gone ends within a
/// second instead of holding the lock (where the platform can tell).
pub(crate) const PREPARE: &str = "set local search_path = pg_catalog; \
     set local standard_conforming_strings = on; \
     set local client_min_messages = warning; \
     set local check_function_bodies = on; \
     set local statement_timeout = 0; \
     set local idle_in_transaction_session_timeout = '60s'; \
     do $wh$ begin perform set_config('client_connection_check_interval', '1s', true); exception when others then null; end $wh$";

/// Limits every later wait for a lock in this transaction.
pub(crate) fn set_lock_timeout(milliseconds: u128) -> String {
    format!("set local lock_timeout = {milliseconds}")
}

/// Serialises everybody who migrates the schema `$1` until their commit.
pub(crate) const LOCK: &str =
    "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('workpump migrate ' || $1, 0))";

/// Who holds that lock, for a person.
pub(crate) const LOCK_HOLDER: &str = "select pg_catalog.format('process %s (application %L, user %L, in this transaction since %s)', \
     a.pid, a.application_name, a.usename, a.xact_start) \
     from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid \
     where l.locktype = 'advisory' and l.granted and l.objsubid = 1 \
     and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()) \
     and (l.classid::bigint << 32) | l.objid::bigint = pg_catalog.hashtextextended('workpump migrate ' || $1, 0)";

/// Makes the schema. Only sent when it is missing: an owner with CREATE on the schema alone may not send it.
pub(crate) fn create_schema(schema: &SchemaName) -> String {
    format!("create schema {}", schema.identifier())
}

/// Makes the ledger.
pub(crate) fn create_ledger(schema: &SchemaName) -> String {
    format!(
        "create table {} (name text primary key, checksum text not null, min_library text not null, \
         applied_at timestamptz not null default pg_catalog.clock_timestamp())",
        ledger_name(schema)
    )
}

/// Notes an applied migration: name, checksum, oldest library.
pub(crate) fn insert_ledger(schema: &SchemaName) -> String {
    format!("insert into {} (name, checksum, min_library) values ($1, $2, $3)", ledger_name(schema))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_listed_in_the_order_of_their_names_and_none_is_forgotten() {
        let names: Vec<_> = MIGRATIONS.iter().map(|migration| migration.name).collect();
        assert!(names.is_sorted(), "{names:?}");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| {
                entry.unwrap().file_name().into_string().unwrap().trim_end_matches(".sql").to_owned()
            })
            .collect();
        files.sort_unstable();
        assert_eq!(names, files);
    }

    #[test]
    fn a_schema_named_like_a_token_is_not_read_again() {
        let schema = SchemaName::new("@schema_text@").unwrap();
        let migration = Migration {
            name: "x",
            min_library: "0.1.0",
            sql: "-- @schema@\nselect @schema@.f(@schema_text@, '@schemas')",
        };
        assert_eq!(migration.sql_for(&schema), "select \"@schema_text@\".f('@schema_text@', '@schemas')\n");
    }

    #[test]
    fn line_ends_do_not_change_a_checksum() {
        let with = |sql| Migration { name: "x", min_library: "0.1.0", sql }.checksum();
        assert_eq!(with("a\r\nb\r\n"), with("a\nb\n"));
        assert_ne!(with("a\nb\n"), with("a\nc\n"));
        assert_eq!(with("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
