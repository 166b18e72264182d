-- Liveness: one predicate from two signals, the alive-lock and the heartbeat.
--
-- The rule: an instance is alive while some session holds its alive-lock exclusively in this database, or while its last beat is not
-- stale. Everything that asks "alive?" asks here; four definitions in four places evict healthy instances.

-- wh_alive_key: the advisory key of an instance's alive-lock. 64 bits and the schema's name in it: two pumps in two schemas of one
-- database must not keep each other's dead alive.
create function @schema@.wh_alive_key(p_instance_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump alive ' || @schema_text@ || ' ' || p_instance_id::text, 0);

-- wh_held_keys: the 64-bit advisory keys held exclusively in this database, and by whom. pg_locks shows every database's locks; a death
-- watcher's shared lock is no sign of life.
create function @schema@.wh_held_keys() returns table (key bigint, pid int)
language sql volatile cost 1000 rows 100 set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select (l.classid::bigint << 32) | l.objid::bigint, l.pid
    from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 1 and l.granted and l.mode = 'ExclusiveLock'
      and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
$wh$;

-- wh_lock_held: whether anybody holds this instance's alive-lock.
create function @schema@.wh_lock_held(p_instance_id uuid) returns boolean
language sql volatile cost 10000 set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select exists (select 1 from @schema@.wh_held_keys() h where h.key = @schema@.wh_alive_key(p_instance_id))
$wh$;

-- claim_instance_alive_lock: takes the alive-lock for this session, without waiting. False: another session holds it (the half-open
-- session of the same process, or a watcher for an instant): try again. A second call in the holding session changes nothing.
create function @schema@.claim_instance_alive_lock(p_instance_id uuid) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if exists (select 1 from @schema@.wh_held_keys() h where h.key = @schema@.wh_alive_key(p_instance_id) and h.pid = pg_backend_pid()) then
        return true;
    end if;
    return pg_try_advisory_lock(@schema@.wh_alive_key(p_instance_id));
end $wh$;

-- release_instance_alive_lock: gives it back, for the kill-switch. False: this session did not hold it.
create function @schema@.release_instance_alive_lock(p_instance_id uuid) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if exists (select 1 from @schema@.wh_held_keys() h where h.key = @schema@.wh_alive_key(p_instance_id) and h.pid = pg_backend_pid()) then
        return pg_advisory_unlock(@schema@.wh_alive_key(p_instance_id));
    end if;
    return false;
end $wh$;

-- is_instance_alive: either signal. The heartbeat counts for p_threshold_seconds, or for two declared beats and 5 s if that is longer.
create function @schema@.is_instance_alive(p_instance_id uuid, p_threshold_seconds int default 30) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return exists (
            select 1 from @schema@.wh_service_instances m
            where m.instance_id = p_instance_id
              and m.last_heartbeat_at >= @schema@.wh_stale_before(clock_timestamp(),
                  clock_timestamp() - make_interval(secs => p_threshold_seconds), m.heartbeat_interval_seconds))
        or @schema@.wh_lock_held(p_instance_id);
end $wh$;

-- wh_live_instances: who is a member and what each signal says, for operators and for routing.
create view @schema@.wh_live_instances as
select m.instance_id, m.service_name, m.host_name, m.process_id, m.started_at, m.last_heartbeat_at,
    pg_catalog.clock_timestamp() - m.last_heartbeat_at as heartbeat_age,
    m.heartbeat_interval_seconds, m.lock_declared, h.key is not null as lock_held, m.accepts_work, m.categories,
    h.key is not null or m.last_heartbeat_at >= @schema@.wh_stale_before(pg_catalog.clock_timestamp(),
        pg_catalog.clock_timestamp() - interval '30 seconds', m.heartbeat_interval_seconds) as alive
from @schema@.wh_service_instances m
left join (select distinct k.key from @schema@.wh_held_keys() k) h on h.key = @schema@.wh_alive_key(m.instance_id);
