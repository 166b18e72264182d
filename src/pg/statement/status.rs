//! What operators look at. Counts use the same predicates as claiming does.

use crate::pg::schema_name::SchemaName;

/// The members, with the age of their heartbeats, what they lease and what they run.
pub(crate) fn instances(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    format!(
        "SELECT i.instance_id, i.service_name, i.host_name, i.process_id, \
                extract(epoch FROM clock_timestamp() - i.last_heartbeat_at)::float8, i.heartbeat_interval_seconds, i.lock_declared, \
                i.accepts_work, coalesce(i.metadata ->> 'gate', 'unknown'), \
                {schema}.is_instance_alive(i.instance_id, greatest(30, 2 * coalesce(i.heartbeat_interval_seconds, 0) + 5)), \
                (SELECT count(*) FROM {schema}.wh_outbox w WHERE w.instance_id = i.instance_id AND w.processed_at IS NULL \
                     AND w.claimable_at IS NOT NULL) \
              + (SELECT count(*) FROM {schema}.wh_inbox w WHERE w.instance_id = i.instance_id AND w.processed_at IS NULL \
                     AND w.claimable_at IS NOT NULL) \
              + (SELECT count(*) FROM {schema}.wh_perspective_events w WHERE w.instance_id = i.instance_id AND w.processed_at IS NULL \
                     AND w.claimable_at IS NOT NULL) \
              + (SELECT count(*) FROM {schema}.wh_receptor_processing w WHERE w.instance_id = i.instance_id AND w.completed_at IS NULL \
                     AND w.claimable_at IS NOT NULL), \
                i.metadata ->> 'gate_reason', i.categories \
         FROM {schema}.wh_service_instances i ORDER BY i.instance_id"
    )
}

/// Depth of each category: waiting now, leased, parked, dead-lettered, and the age of the oldest unfinished row.
pub(crate) fn categories(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    let part = |category: &str, table: &str, done: &str, created: &str| {
        format!(
            "SELECT '{category}', count(*) FILTER (WHERE claimable_at IS NULL), \
                    count(*) FILTER (WHERE lease_expiry > clock_timestamp()), \
                    count(*) FILTER (WHERE instance_id IS NULL AND claimable_at > clock_timestamp()), \
                    count(*) FILTER (WHERE claimable_at <= clock_timestamp()), \
                    (SELECT count(*) FROM {schema}.wh_dead_letters d WHERE d.category = '{category}' AND d.replayed_at IS NULL), \
                    extract(epoch FROM clock_timestamp() - min({created}))::float8 \
             FROM {schema}.{table} WHERE {done} IS NULL"
        )
    };
    [
        part("outbox", "wh_outbox", "processed_at", "created_at"),
        part("inbox", "wh_inbox", "processed_at", "received_at"),
        part("perspective_event", "wh_perspective_events", "processed_at", "created_at"),
        part("receptor", "wh_receptor_processing", "completed_at", "created_at"),
    ]
    .join(" UNION ALL ")
}

/// The tombstones of those who did not leave by themselves.
pub(crate) fn evictions(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    format!(
        "SELECT t.instance_id, t.evicted_by, t.reason, extract(epoch FROM clock_timestamp() - t.evicted_at)::float8, \
                t.released_at IS NOT NULL \
         FROM {schema}.wh_instance_evictions t WHERE t.reason <> 'left' ORDER BY t.evicted_at DESC"
    )
}
