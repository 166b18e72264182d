//! What `doctor` asks. Everything reads, nothing locks more than a catalog, and every list is bounded.
//!
//! Each statement runs in a transaction of its own with the limits of [`begin`], so that it has them behind a pooler too, and so that
//! definitions come with every name qualified.

use crate::pg::schema_name::SchemaName;

/// The categories' tables: category, table, and the column that says when a row was finished.
const WORK: [(&str, &str, &str); 4] = [
    ("outbox", "wh_outbox", "processed_at"),
    ("inbox", "wh_inbox", "processed_at"),
    ("perspective_event", "wh_perspective_events", "processed_at"),
    ("receptor", "wh_receptor_processing", "completed_at"),
];

/// Begins a look that takes `milliseconds` at most and waits for a lock for a second at most.
pub(crate) fn begin(milliseconds: u128) -> String {
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL statement_timeout = {milliseconds}; SET LOCAL lock_timeout = 1000; \
         SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL standard_conforming_strings = on; SET LOCAL quote_all_identifiers = off; \
         SET LOCAL intervalstyle = postgres; SET LOCAL datestyle = iso"
    )
}

/// Ends it.
pub(crate) const END: &str = "ROLLBACK";

/// Begins a transaction, to see who serves it.
pub(crate) const BEGIN: &str = "BEGIN";

/// Who serves this statement.
pub(crate) const BACKEND: &str = "SELECT pg_catalog.pg_backend_pid()";

/// Which database of which server: database, its id, standby or not, the server's start in microseconds, version as number and as text,
/// role, and whether it is reached through a Unix socket.
pub(crate) const IDENTITY: &str = "SELECT current_database()::text, d.oid::text, pg_is_in_recovery(), \
     (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, current_setting('server_version_num')::int, \
     current_setting('server_version'), current_user::text, inet_client_addr() IS NULL \
     FROM pg_database d WHERE d.datname = current_database()";

/// The cluster's own number; some installations let only administrators see it.
pub(crate) const SYSTEM: &str = "SELECT system_identifier::text FROM pg_control_system()";

/// The server's clock, in microseconds since 1970.
pub(crate) const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

/// The settings `$1` with which a session of this role in this database starts; times in their base unit.
pub(crate) const SETTINGS: &str =
    "SELECT name, coalesce(reset_val, ''), coalesce(unit, '') FROM pg_settings WHERE name = ANY ($1)";

/// The settings `$1` as they are in force: those of TCP are read from the socket. Null for one the server does not know.
pub(crate) const IN_FORCE: &str = "SELECT n.name, current_setting(n.name, true) FROM unnest($1) n (name)";

/// Sessions in all, of this database, and of this role; the limits of the two, -1 for none.
pub(crate) const SESSIONS: &str = "SELECT (SELECT coalesce(sum(s.numbackends), 0)::bigint FROM pg_stat_database s), \
     (SELECT s.numbackends::bigint FROM pg_stat_database s WHERE s.datid = d.oid), \
     (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid), d.datconnlimit::bigint, r.rolconnlimit::bigint \
     FROM pg_database d, pg_roles r WHERE d.datname = current_database() AND r.rolname = current_user";

/// What keeps dead rows of this database from being removed, the oldest first: kind, name, description, transactions, seconds.
///
/// Query texts are left out: they may hold the data of users. A VACUUM holds nobody back.
pub(crate) const HORIZON: &str = "SELECT kind, name, described, transactions::bigint, seconds::float8 FROM ( \
     SELECT 'session' AS kind, a.pid::text AS name, format('user %s, application %s, %s', coalesce(a.usename, '-'), \
            coalesce(nullif(a.application_name, ''), '-'), coalesce(a.state, a.backend_type, 'state unknown')) AS described, \
            greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions, \
            extract(epoch FROM clock_timestamp() - a.xact_start) AS seconds \
     FROM pg_stat_activity a \
     WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid() \
       AND (a.datname = current_database() OR a.datname IS NULL) \
       AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid) \
     UNION ALL \
     SELECT 'prepared transaction', p.gid, format('owner %s', p.owner), age(p.transaction), \
            extract(epoch FROM clock_timestamp() - p.prepared) \
     FROM pg_prepared_xacts p WHERE p.database = current_database() \
     UNION ALL \
     SELECT 'replication slot', r.slot_name::text, CASE WHEN r.active THEN 'in use' ELSE 'not in use' END, \
            age(r.xmin), NULL \
     FROM pg_replication_slots r WHERE r.xmin IS NOT NULL) h \
     ORDER BY transactions DESC NULLS LAST, seconds DESC NULLS LAST LIMIT 5";

/// Whether the sessions of other roles are shown.
pub(crate) const SEES_ALL: &str = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')";

/// How full the notification queue is (0 to 1), and the oldest open transaction of the whole server: described, or null, and its seconds.
pub(crate) const QUEUE: &str = "SELECT pg_notification_queue_usage(), o.described, o.seconds FROM (SELECT 1) one LEFT JOIN LATERAL ( \
     SELECT format('process %s (database %s, user %s, application %s, %s)', a.pid, coalesce(a.datname, '-'), coalesce(a.usename, '-'), \
            coalesce(nullif(a.application_name, ''), '-'), coalesce(a.state, 'state unknown')) AS described, \
            extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds \
     FROM pg_stat_activity a WHERE a.xact_start IS NOT NULL AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid() \
     ORDER BY a.xact_start LIMIT 1) o ON true";

/// The tables `$2` of the schema `$1`: name, live rows, dead rows, and whether autovacuum was switched off for it.
pub(crate) const TABLES: &str = "SELECT c.relname::text, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), \
     EXISTS (SELECT FROM pg_options_to_table(c.reloptions) o \
         WHERE CASE WHEN o.option_name = 'autovacuum_enabled' THEN NOT o.option_value::boolean ELSE false END) \
     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid \
     WHERE n.nspname = $1 AND c.relname = ANY ($2) AND c.relkind = 'r' ORDER BY 1";

/// What the role may do in the schema `$1`: its name, USAGE, CREATE, and whether it may notify. No row: there is no such schema.
pub(crate) const RIGHTS: &str = "SELECT current_user::text, has_schema_privilege(n.oid, 'USAGE'), has_schema_privilege(n.oid, 'CREATE'), \
     has_function_privilege('pg_catalog.pg_notify(text, text)', 'EXECUTE') FROM pg_namespace n WHERE n.nspname = $1";

/// What the role lacks on the relations `$2` of the schema `$1`, of which `$3` are only read, and on the sequences of their arrival order:
/// names, ready for GRANT, and privileges.
pub(crate) const LACKING_TABLES: &str = "SELECT CASE WHEN c.relkind = 'S' THEN 'SEQUENCE ' ELSE '' END || c.oid::regclass::text, l.lacking \
     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
     CROSS JOIN LATERAL (SELECT string_agg(p.privilege, ', ' ORDER BY p.place) AS lacking \
         FROM unnest(CASE WHEN c.relkind = 'S' THEN ARRAY['USAGE'] WHEN c.relname = ANY ($3) THEN ARRAY['SELECT'] \
             ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) WITH ORDINALITY AS p (privilege, place) \
         WHERE NOT CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, p.privilege) \
             ELSE has_table_privilege(c.oid, p.privilege) END) l \
     WHERE n.nspname = $1 AND l.lacking IS NOT NULL \
       AND (c.relkind IN ('r', 'v') AND c.relname = ANY ($2) \
         OR c.relkind = 'S' AND c.relname = ANY (ARRAY(SELECT r || '_seq_seq' FROM unnest($2) AS r))) ORDER BY 1";

/// The functions among `$2` in the schema `$1` that the role may not call, ready for GRANT.
pub(crate) const LACKING_FUNCTIONS: &str = "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
     WHERE n.nspname = $1 AND p.proname = ANY ($2) AND NOT has_function_privilege(p.oid, 'EXECUTE') ORDER BY 1";

/// How the server writes the schema's name `$1`: as an identifier, and as the tag in the names of session settings.
pub(crate) const SPELLING: &str = "SELECT quote_ident($1), left(md5($1), 8)";

/// What is there of the relations `$2` and functions `$3` in the schema `$1`: kind, name, definition, a function's body, and whether it is
/// in force (an index valid, a trigger switched on, a constraint checked).
///
/// What servers of different versions say differently is left out: not-null constraints (rows of `pg_constraint` since 18, a mark of the
/// column before), and storage parameters, which are for operators to choose.
pub(crate) const OBJECTS: &str = "WITH relation AS ( \
         SELECT c.* FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = $1 AND c.relname = ANY ($2) AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'c') \
     ) \
     SELECT 'relation', c.relname::text, \
            CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view ' || pg_get_viewdef(c.oid) WHEN 'c' THEN 'type' \
                ELSE 'kind ' || c.relkind::text END \
            || CASE c.relpersistence WHEN 'p' THEN '' WHEN 'u' THEN ' unlogged' ELSE ' temporary' END \
            || CASE WHEN c.relrowsecurity THEN ' row security' ELSE '' END, NULL, true \
     FROM relation c \
     UNION ALL \
     SELECT 'column', c.relname || '.' || a.attname, \
            format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END \
            || CASE a.attidentity WHEN 'a' THEN ' identity always' WHEN 'd' THEN ' identity' ELSE '' END \
            || CASE a.attgenerated WHEN 's' THEN ' stored' WHEN 'v' THEN ' virtual' ELSE '' END \
            || coalesce(' ' || pg_get_expr(d.adbin, d.adrelid), ''), NULL, true \
     FROM relation c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped \
     LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum \
     UNION ALL \
     SELECT 'index', c.relname || '.' || x.relname, pg_get_indexdef(i.indexrelid), NULL, i.indisvalid AND i.indisready AND i.indislive \
     FROM relation c JOIN pg_index i ON i.indrelid = c.oid JOIN pg_class x ON x.oid = i.indexrelid \
     UNION ALL \
     SELECT 'constraint', c.relname || '.' || k.conname, pg_get_constraintdef(k.oid), NULL, k.convalidated \
     FROM relation c JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype IN ('c', 'f', 'p', 'u', 'x') \
     UNION ALL \
     SELECT 'trigger', c.relname || '.' || t.tgname, pg_get_triggerdef(t.oid), NULL, t.tgenabled IN ('O', 'A') \
     FROM relation c JOIN pg_trigger t ON t.tgrelid = c.oid AND NOT t.tgisinternal \
     UNION ALL \
     SELECT 'function', p.proname || '(' || oidvectortypes(p.proargtypes) || ')', \
            concat_ws(' ', CASE p.prokind WHEN 'p' THEN 'procedure' WHEN 'f' THEN 'function' ELSE 'kind ' || p.prokind::text END, \
                '(' || pg_get_function_arguments(p.oid) || ')', 'returns ' || pg_get_function_result(p.oid), l.lanname, \
                CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END, \
                CASE p.proparallel WHEN 's' THEN 'parallel safe' WHEN 'r' THEN 'parallel restricted' END, \
                CASE WHEN p.proisstrict THEN 'strict' END, CASE WHEN p.prosecdef THEN 'security definer' END, \
                'set ' || array_to_string(p.proconfig, ', '), pg_get_function_sqlbody(p.oid)), \
            CASE WHEN p.prosqlbody IS NULL THEN p.prosrc END, true \
     FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_language l ON l.oid = p.prolang \
     WHERE n.nspname = $1 AND p.proname = ANY ($3)";

/// Everything of the schema `$1`, to write the list of what belongs there: the names of relations, and of functions.
#[cfg(test)]
pub(crate) const NAMES: &str = "SELECT ARRAY(SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = n.oid \
         AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'c')), \
     ARRAY(SELECT DISTINCT p.proname::text FROM pg_proc p WHERE p.pronamespace = n.oid) FROM pg_namespace n WHERE n.nspname = $1";

/// The members: id, service, host, process, seconds since the last beat, alive or not, gate, version of the library, why the gate is as
/// it is, and what it runs (null: all).
pub(crate) fn members(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    format!(
        "SELECT i.instance_id, i.service_name, i.host_name, i.process_id, \
                extract(epoch FROM clock_timestamp() - i.last_heartbeat_at)::float8, \
                {schema}.is_instance_alive(i.instance_id, 30), i.metadata ->> 'gate', i.metadata ->> 'library_version', \
                i.metadata ->> 'gate_reason', i.categories \
         FROM {schema}.wh_service_instances i ORDER BY i.instance_id LIMIT 1000"
    )
}

/// Tombstones of which something is left to hand back: how many, and the seconds since the oldest.
pub(crate) fn unreleased(schema: &SchemaName) -> String {
    format!(
        "SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(t.evicted_at)), 0)::float8 \
         FROM {}.wh_instance_evictions t WHERE t.released_at IS NULL",
        schema.identifier()
    )
}

/// Each category, at most 1 001 of each: whether anything is unfinished, rows whose lease ran out more than a minute ago, and rows leased
/// to somebody who is neither a member nor waiting to be released.
pub(crate) fn stuck(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    let part = |(category, table, done): (&str, &str, &str)| {
        format!(
            "SELECT '{category}', EXISTS (SELECT FROM {schema}.{table} w WHERE w.{done} IS NULL), \
                 (SELECT count(*) FROM (SELECT FROM {schema}.{table} w WHERE w.{done} IS NULL AND w.claimable_at IS NOT NULL \
                     AND w.instance_id IS NOT NULL AND w.lease_expiry < clock_timestamp() - interval '1 minute' LIMIT 1001) expired), \
                 (SELECT count(*) FROM (SELECT FROM {schema}.{table} w WHERE w.{done} IS NULL AND w.claimable_at IS NOT NULL \
                     AND w.instance_id IS NOT NULL AND w.lease_expiry >= clock_timestamp() \
                     AND NOT EXISTS (SELECT FROM {schema}.wh_service_instances i WHERE i.instance_id = w.instance_id) \
                     AND NOT EXISTS (SELECT FROM {schema}.wh_instance_evictions t \
                         WHERE t.instance_id = w.instance_id AND t.released_at IS NULL) LIMIT 1001) unowned)"
        )
    };
    WORK.map(part).join(" UNION ALL ")
}

/// Rows given up and not replayed, at most 100 001 of each category.
pub(crate) fn dead_letters(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    let part = |(category, _, _): (&str, &str, &str)| {
        format!(
            "SELECT '{category}', (SELECT count(*) FROM (SELECT FROM {schema}.wh_dead_letters d \
             WHERE d.category = '{category}' AND d.replayed_at IS NULL LIMIT 100001) pending)"
        )
    };
    WORK.map(part).join(" UNION ALL ")
}

/// Statements for people, in next steps: nothing here is ever sent.
pub(crate) mod advice {
    use crate::pg::schema_name::SchemaName;

    /// A string literal.
    fn literal(text: &str) -> String {
        text.replace('\'', "''")
    }

    /// Ends a session.
    pub(crate) fn terminate(process: &str) -> String {
        format!("SELECT pg_terminate_backend({process})")
    }

    /// Ends a prepared transaction.
    pub(crate) fn end_prepared(name: &str) -> String {
        format!("COMMIT PREPARED or ROLLBACK PREPARED '{}'", literal(name))
    }

    /// Drops a replication slot.
    pub(crate) fn drop_slot(name: &str) -> String {
        format!("SELECT pg_drop_replication_slot('{}')", literal(name))
    }

    /// Evicts an instance by hand; `instance` is an expression.
    pub(crate) fn evict(schema: &SchemaName, instance: &str) -> String {
        format!("SELECT {}.evict_instance({instance}, null, 'by hand')", schema.identifier())
    }

    /// Who waits for whom.
    pub(crate) const BLOCKERS: &str = "SELECT pid, pg_blocking_pids(pid), state, xact_start FROM pg_stat_activity WHERE wait_event_type = 'Lock'";

    /// What is set for roles and databases.
    pub(crate) const ROLE_SETTINGS: &str = "SELECT * FROM pg_db_role_setting";
}
