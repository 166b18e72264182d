-- Membership: beats, eviction, and the release of what the evicted still held.
--
-- The rule: an instance stops being a member in one tiny transaction (T1: member deleted, tombstone written, peers rung). From that
-- commit on every write of it is refused. Only then are its leases handed back, in bounded passes that anyone may continue: a tombstone
-- with `released_at` null is unfinished business. A tombstoned id never becomes a member again.

-- wh_stale_before: a heartbeat older than this is stale. The caller's cut-off, unless the member declared so slow a beat that two of
-- them and 5 s reach further back: a 30 s beat judged by a 30 s cut-off kills healthy instances. Null means undeclared.
create function @schema@.wh_stale_before(p_now timestamptz, p_cutoff timestamptz, p_declared_seconds int) returns timestamptz
language sql stable parallel safe
return least(p_cutoff, p_now - pg_catalog.make_interval(secs => 2.0 * p_declared_seconds + 5));

-- wh_member_key: the advisory key that orders a first beat against an eviction of the same id. Without it, an id evicted between the
-- beat's look at the tombstones and its insert would be a member and a dead one at once.
create function @schema@.wh_member_key(p_instance_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump member ' || @schema_text@ || ' ' || p_instance_id::text, 0);

-- wh_join: the insert half of a beat. False for a tombstoned id. The tombstone is looked for in a snapshot taken after the update that
-- found no member, and under the member key: an upsert would wait for the evictor's delete and then insert on its old verdict.
create function @schema@.wh_join(p_instance_id uuid, p_service_name text, p_host_name text, p_process_id int, p_metadata jsonb,
    p_interval_seconds int, p_lock_declared boolean, p_accepts_work boolean, p_categories text[]) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform pg_advisory_xact_lock(@schema@.wh_member_key(p_instance_id));
    if exists (select 1 from @schema@.wh_instance_evictions t where t.instance_id = p_instance_id) then
        return false;
    end if;
    insert into @schema@.wh_service_instances (instance_id, service_name, host_name, process_id, metadata,
        heartbeat_interval_seconds, lock_declared, accepts_work, categories)
    values (p_instance_id, p_service_name, p_host_name, p_process_id, p_metadata, p_interval_seconds, p_lock_declared, p_accepts_work,
        p_categories)
    on conflict do nothing;
    return true;
end $wh$;

-- wh_bury: the second half of T1, after the caller deleted the member row. Writes the tombstone (the first record wins) and rings
-- `orphan` to whoever is alive. True when the tombstone is new.
create function @schema@.wh_bury(p_instance uuid, p_by uuid, p_reason text) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    insert into @schema@.wh_instance_evictions (instance_id, evicted_by, reason) values (p_instance, p_by, p_reason)
    on conflict do nothing;
    if not found then
        return false;
    end if;
    perform @schema@.wh_ring_members('orphan');
    return true;
end $wh$;

-- wh_release_<category>: hands back at most p_max_rows rows (null: all) that p_instance still leases; returns how many. Rows that
-- somebody has locked are left for the next pass: a release never waits, so it can neither hold up nor deadlock with a settlement.
-- p_crashed: the owner died. Then the row that was being worked on counts one crash: an unordered row, or the head of its order key
-- (what waits behind a head never ran, and a poisonous head must not drag its followers into the dead letters). It gets reason 6 and
-- a text, unless an earlier error is on record. Attempts stay charged.
do $wh$
declare
    v_template constant text := $wh_template$
create function @ns@.wh_release_@category@(p_instance uuid, p_max_rows int, p_crashed boolean) returns int
language plpgsql set search_path = pg_catalog, @ns@, pg_temp
-- Walks along indexes, whatever the statistics say: a thousand ids of a table full of leases make the planner read the whole table.
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan
as $wh_body$
declare
    v_unharmed tid[];
    v_crashed tid[];
    v_hint jsonb := nullif(current_setting('@hint@', true), '')::jsonb;
    v_until timestamptz;
    v_last timestamptz;
    v_done int := 0;
begin
    if p_max_rows < 1 then
        return 0;
    end if;
    if v_hint ->> 'instance' = p_instance::text then
        v_until := (v_hint ->> 'until')::timestamptz;
    end if;
    loop
        with held as materialized (
            select w.ctid as id, w.seq, w.claimable_at, @order_key@
            from @ns@.@table@ w
            where w.instance_id = p_instance and w.@done@ is null and w.claimable_at <= coalesce(v_until, 'infinity')
            order by w.claimable_at desc
            limit p_max_rows - v_done
            for update skip locked
        )
        select array_agg(j.id) filter (where not j.crashed), array_agg(j.id) filter (where j.crashed), min(j.claimable_at)
        into v_unharmed, v_crashed, v_last
        from (
            select h.id, h.claimable_at, p_crashed
                and not exists (select 1 from @ns@.@table@ w
                    where @same_key@ and w.seq < h.seq and w.@done@ is null and w.claimable_at is null)
                and not exists (select 1 from @ns@.@table@ w
                    where @same_key@ and w.seq < h.seq and w.@done@ is null and w.instance_id is not null and w.stream_id is not null)
                and not exists (select 1 from @ns@.@table@ w
                    where @same_key@ and w.seq < h.seq and w.@done@ is null and w.instance_id is null and w.claimable_at is not null
                        and w.stream_id is not null) as crashed
            from held h
            offset 0
        ) j;
        -- They are locked, so they stay where they are.
        update @ns@.@table@ w set instance_id = null, lease_expiry = null where w.ctid = any (v_unharmed);
        update @ns@.@table@ w
        set instance_id = null, lease_expiry = null, crash_count = w.crash_count + 1,
            failure_reason = case when w.error is null then 6 else w.failure_reason end,
            error = coalesce(w.error, 'abandoned: instance ' || p_instance || ' ended while it held this row')
        where w.ctid = any (v_crashed);
        v_done := v_done + coalesce(cardinality(v_unharmed), 0) + coalesce(cardinality(v_crashed), 0);
        exit when v_done >= p_max_rows or v_until is null;
        -- Whoever was locked when the walk came by.
        v_until := null;
    end loop;
    if v_last is not null then
        perform set_config('@hint@', jsonb_build_object('instance', p_instance, 'until', v_last)::text, false);
    end if;
    return v_done;
end $wh_body$$wh_template$;
    v_row record;
begin
    for v_row in
        select * from (values
            ('outbox', 'wh_outbox', 'processed_at', 'w.stream_id', 'w.stream_id = h.stream_id'),
            ('inbox', 'wh_inbox', 'processed_at', 'w.stream_id', 'w.stream_id = h.stream_id'),
            ('perspective_event', 'wh_perspective_events', 'processed_at', 'w.stream_id, w.perspective_name',
                'w.stream_id = h.stream_id and w.perspective_name = h.perspective_name'),
            ('receptor', 'wh_receptor_processing', 'completed_at', 'w.stream_id, w.receptor_name',
                'w.stream_id = h.stream_id and w.receptor_name = h.receptor_name')
        ) as t (category, tab, done, order_key, same_key)
    loop
        execute replace(replace(replace(replace(replace(replace(replace(v_template,
            -- Per schema, since sessions behind a pooler are shared.
            '@hint@', 'workpump.release_' || v_row.category || '_' || left(md5(@schema_text@), 8)),
            '@category@', v_row.category), '@table@', v_row.tab), '@done@', v_row.done),
            '@order_key@', v_row.order_key), '@same_key@', v_row.same_key),
            -- Last, so that no schema name is taken for a placeholder.
            '@ns@', quote_ident(@schema_text@));
    end loop;
end $wh$;

-- wh_release_instance: one pass over what an evicted instance still holds, at most p_max_rows rows (null: all); returns how many came
-- back, assignments of streams included, so that a bound over several instances covers them. Refused before T1: a member that still
-- claims would retake the rows. When nothing is left and no producer is open that counted on this instance to look again (the arm
-- lock, see doorbells), `released_at` is set. Two callers never work on the same tombstone.
create function @schema@.wh_release_instance(p_instance uuid, p_max_rows int default 1000) returns int
language plpgsql set search_path = pg_catalog, @schema@, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $wh$
declare
    v_tombstone @schema@.wh_instance_evictions;
    v_crashed boolean;
    v_done int := 0;
    v_streams int;
begin
    select t.* into v_tombstone from @schema@.wh_instance_evictions t where t.instance_id = p_instance for update skip locked;
    if not found then
        if exists (select 1 from @schema@.wh_instance_evictions t where t.instance_id = p_instance) then
            return 0;
        end if;
        raise exception using errcode = '55000', message = format('instance %s is not evicted: its rows cannot be released', p_instance),
            hint = 'call evict_instance first';
    end if;
    v_crashed := v_tombstone.reason <> 'left';
    -- Fixed order of the tables; `limit` takes null as no limit.
    v_done := @schema@.wh_release_outbox(p_instance, p_max_rows, v_crashed);
    v_done := v_done + @schema@.wh_release_inbox(p_instance, p_max_rows - v_done, v_crashed);
    v_done := v_done + @schema@.wh_release_perspective_event(p_instance, p_max_rows - v_done, v_crashed);
    v_done := v_done + @schema@.wh_release_receptor(p_instance, p_max_rows - v_done, v_crashed);
    update @schema@.wh_active_streams s set assigned_instance_id = null, lease_expiry = null
    where s.stream_id = any (array(
        select a.stream_id from @schema@.wh_active_streams a where a.assigned_instance_id = p_instance
        limit p_max_rows - v_done for update skip locked));
    get diagnostics v_streams = row_count;
    if v_done > 0 then
        perform @schema@.wh_ring_armed('orphan');
    end if;
    if v_tombstone.released_at is null and (p_max_rows is null or v_done + v_streams < p_max_rows)
        and not exists (select 1 from @schema@.wh_outbox w where w.instance_id = p_instance and w.processed_at is null and w.claimable_at is not null)
        and not exists (select 1 from @schema@.wh_inbox w where w.instance_id = p_instance and w.processed_at is null and w.claimable_at is not null)
        and not exists (select 1 from @schema@.wh_perspective_events w where w.instance_id = p_instance and w.processed_at is null and w.claimable_at is not null)
        and not exists (select 1 from @schema@.wh_receptor_processing w where w.instance_id = p_instance and w.completed_at is null and w.claimable_at is not null)
        and not exists (select 1 from @schema@.wh_active_streams s where s.assigned_instance_id = p_instance)
        -- A producer that counted on the dead one may commit after everybody looked: ring once more when it has. A frozen process
        -- that is armed itself keeps this lock; ten minutes later nobody waits for it any more.
        and (pg_try_advisory_xact_lock(@schema@.wh_arm_key(p_instance)) or v_tombstone.evicted_at < clock_timestamp() - interval '10 minutes')
    then
        update @schema@.wh_instance_evictions t set released_at = clock_timestamp() where t.instance_id = p_instance;
        perform @schema@.wh_ring_armed('orphan');
    end if;
    return v_done + v_streams;
end $wh$;

-- wh_release_evicted: goes on with every unfinished tombstone, at most p_max_rows rows in all; returns how many came back. The
-- backstop for an evictor that died between T1 and the end of the release.
create function @schema@.wh_release_evicted(p_max_rows int default 1000) returns int
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_instance uuid;
    v_done int := 0;
begin
    for v_instance in
        select t.instance_id from @schema@.wh_instance_evictions t where t.released_at is null order by t.evicted_at limit 100
    loop
        v_done := v_done + @schema@.wh_release_instance(v_instance, p_max_rows - v_done);
        exit when v_done >= p_max_rows;
    end loop;
    return v_done;
end $wh$;

-- wh_evict_stale: T1 for every member whose beat is stale and whose alive-lock nobody holds; a beat older than p_definitive_dead_cutoff
-- counts as dead although the lock is held (a half-open connection keeps it for hours). Members somebody has locked, a claim in flight
-- or a peer's sweep, are left for the next one: two beats that sweep each other would deadlock.
create function @schema@.wh_evict_stale(p_me uuid, p_stale_cutoff timestamptz, p_definitive_dead_cutoff timestamptz) returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_now constant timestamptz := clock_timestamp();
    v_peer record;
begin
    for v_peer in
        select m.instance_id, coalesce(m.last_heartbeat_at < p_definitive_dead_cutoff, false) as definitive
        from @schema@.wh_service_instances m
        where m.last_heartbeat_at < p_stale_cutoff
          and m.last_heartbeat_at < @schema@.wh_stale_before(v_now, p_stale_cutoff, m.heartbeat_interval_seconds)
          and m.instance_id is distinct from p_me
          and (m.last_heartbeat_at < p_definitive_dead_cutoff or not @schema@.wh_lock_held(m.instance_id))
        order by m.instance_id
        for update skip locked
    loop
        -- The shared lock bars the peer from taking its alive-lock again until this verdict is committed.
        continue when not v_peer.definitive and not pg_try_advisory_xact_lock_shared(@schema@.wh_alive_key(v_peer.instance_id));
        delete from @schema@.wh_service_instances m where m.instance_id = v_peer.instance_id;
        perform @schema@.wh_bury(v_peer.instance_id, p_me, case when v_peer.definitive then 'definitive-dead' else 'stale heartbeat' end);
        return next v_peer.instance_id;
    end loop;
end $wh$;

-- cleanup_stale_instances: evicts the stale and hands back all they held before it returns (rows that somebody has locked at that
-- moment follow with the next sweep). Returns who was evicted.
create function @schema@.cleanup_stale_instances(p_stale_cutoff timestamptz, p_definitive_dead_cutoff timestamptz default null)
returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_instance uuid;
begin
    if p_stale_cutoff is null then
        raise exception using errcode = '22023', message = 'p_stale_cutoff is null', hint = 'pass the instant before which a heartbeat is stale';
    end if;
    for v_instance in select e from @schema@.wh_evict_stale(null, p_stale_cutoff, p_definitive_dead_cutoff) e loop
        perform @schema@.wh_release_instance(v_instance, null);
        return next v_instance;
    end loop;
end $wh$;

-- wh_sweep: what a beat does for others: T1 for stale peers, and one bounded pass of release. Waits for nobody longer than 100 ms.
create function @schema@.wh_sweep(p_me uuid) returns int
language plpgsql set search_path = pg_catalog, @schema@, pg_temp set lock_timeout = '100ms' as $wh$
begin
    perform @schema@.wh_evict_stale(p_me, clock_timestamp() - interval '30 seconds', clock_timestamp() - interval '5 minutes');
    return @schema@.wh_release_evicted(1000);
end $wh$;

-- wh_sweep_key: the advisory key of the backstop sweep.
create function @schema@.wh_sweep_key() returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump sweep ' || @schema_text@, 0);

-- wh_sweep_stale: the backstop, asked for on a timer by whoever is alive: T1 for stale peers, one caller at a time. `evicted` is null when
-- another one is at it. `unfinished`: some tombstone's rows are not all back, go on with wh_release_pass. Releases nothing itself, so that
-- T1 is committed before the first row is free. Waits for nobody longer than 100 ms; what was busy is left for the next sweep.
create function @schema@.wh_sweep_stale(p_me uuid, out evicted uuid[], out unfinished boolean)
language plpgsql set search_path = pg_catalog, @schema@, pg_temp set lock_timeout = '100ms' as $wh$
begin
    if exists (select 1 from @schema@.wh_instance_evictions t where t.instance_id = p_me) then
        raise exception using errcode = 'WH001', message = format('instance %s was evicted: its verdicts do not count', p_me),
            hint = 'start again under a fresh instance id';
    end if;
    if pg_try_advisory_xact_lock(@schema@.wh_sweep_key()) then
        evicted := array(select e from @schema@.wh_evict_stale(p_me, clock_timestamp() - interval '30 seconds',
            clock_timestamp() - interval '5 minutes') e);
    end if;
    unfinished := exists (select 1 from @schema@.wh_instance_evictions t where t.released_at is null);
end $wh$;

-- wh_release_pass: one pass of release, at most p_max_rows rows, and whether a tombstone is unfinished after it. Nothing back and
-- unfinished: its rows are locked, somebody else is at it, or a producer is open that counted on the dead one; come back later.
create function @schema@.wh_release_pass(p_max_rows int, out released int, out unfinished boolean)
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    released := @schema@.wh_release_evicted(p_max_rows);
    unfinished := exists (select 1 from @schema@.wh_instance_evictions t where t.released_at is null);
end $wh$;

-- record_heartbeat: one beat. False: evicted, nothing written. Update first, then the tombstone, then insert (see wh_join). Then the
-- opportunistic sweep, in a subtransaction: whatever happens to it, the beat stands. The update touches no key column, so it neither
-- waits for a claim (FOR KEY SHARE on the member) nor holds one up. p_categories: what it runs, and so what it may be rung for; null is
-- all, for who does not know.
create function @schema@.record_heartbeat(p_instance_id uuid, p_service_name text, p_host_name text, p_process_id int,
    p_metadata jsonb default null, p_interval_seconds int default null, p_lock_declared boolean default false,
    p_accepts_work boolean default true, p_categories text[] default null) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if p_instance_id is null then
        raise exception using errcode = '22023', message = 'p_instance_id is null', hint = 'pass the instance''s own uuid';
    end if;
    if p_interval_seconds <= 0 then
        raise exception using errcode = '22023', message = format('p_interval_seconds is %s, must be positive', p_interval_seconds),
            hint = 'pass the seconds until the next beat, or null to be judged by the caller''s cut-off alone';
    end if;
    if not p_categories <@ array['outbox', 'inbox', 'perspective_event', 'receptor'] then
        raise exception using errcode = 'WH002', message = format('p_categories is %s, with an unknown category', p_categories),
            hint = 'pass some of outbox, inbox, perspective_event and receptor, or null for all of them';
    end if;
    update @schema@.wh_service_instances m
    set last_heartbeat_at = clock_timestamp(), heartbeat_interval_seconds = p_interval_seconds,
        lock_declared = coalesce(p_lock_declared, false), accepts_work = coalesce(p_accepts_work, true),
        categories = p_categories, metadata = coalesce(p_metadata, m.metadata)
    where m.instance_id = p_instance_id;
    if not found and not @schema@.wh_join(p_instance_id, p_service_name, p_host_name, p_process_id, p_metadata, p_interval_seconds,
        coalesce(p_lock_declared, false), coalesce(p_accepts_work, true), p_categories)
    then
        return false;
    end if;
    if exists (select 1 from @schema@.wh_service_instances m
            where m.last_heartbeat_at < clock_timestamp() - interval '30 seconds' and m.instance_id <> p_instance_id)
        or exists (select 1 from @schema@.wh_instance_evictions t where t.released_at is null)
    then
        begin
            perform @schema@.wh_sweep(p_instance_id);
        exception
            when lock_not_available or deadlock_detected or serialization_failure then
                null; -- busy: the next beat tries again
            when others then
                raise warning 'workpump: the sweep of instance % failed and will be tried again: %', p_instance_id, sqlerrm;
        end;
    end if;
    return true;
end $wh$;

-- register_instance_heartbeat (legacy): like a beat that declares nothing and sweeps nothing. A member that beat within the last 10 s is
-- not written again: callers of this one beat with every batch of work. False: evicted.
create function @schema@.register_instance_heartbeat(p_instance_id uuid, p_service_name text, p_host_name text, p_process_id int,
    p_metadata jsonb default null) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    update @schema@.wh_service_instances m
    set last_heartbeat_at = clock_timestamp(), metadata = coalesce(p_metadata, m.metadata)
    where m.instance_id = p_instance_id and m.last_heartbeat_at < clock_timestamp() - interval '10 seconds';
    if found or exists (select 1 from @schema@.wh_service_instances m where m.instance_id = p_instance_id) then
        return true;
    end if;
    return @schema@.wh_join(p_instance_id, p_service_name, p_host_name, p_process_id, p_metadata, null, false, true, null);
end $wh$;

-- evict_instance: T1 by hand, for a member or for an id that is not (yet) one, and the first pass of the release; the sweeps do the
-- rest. True when this call evicted it; the first record wins. Waits for a claim in flight, so that its leases are released too.
create function @schema@.evict_instance(p_instance_id uuid, p_evicted_by uuid, p_reason text) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_new boolean;
begin
    if p_instance_id is null or p_reason is null or p_reason = 'left' then
        raise exception using errcode = '22023',
            message = format('p_instance_id is %s and p_reason is %s', coalesce(p_instance_id::text, 'null'), coalesce(quote_literal(p_reason), 'null')),
            hint = 'pass the instance''s uuid and a reason of your own; ''left'' is written by deregister_instance';
    end if;
    perform pg_advisory_xact_lock(@schema@.wh_member_key(p_instance_id));
    delete from @schema@.wh_service_instances m where m.instance_id = p_instance_id;
    v_new := @schema@.wh_bury(p_instance_id, p_evicted_by, p_reason);
    perform @schema@.wh_release_instance(p_instance_id, 1000);
    return v_new;
end $wh$;

-- deregister_instance: the graceful leave, called before the alive-lock goes: member deleted, tombstone 'left', rows handed back without
-- a crash, peers rung, all in one transaction, so that no watcher ever finds a member without a lock. False: was not a member.
create function @schema@.deregister_instance(p_instance_id uuid) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_member boolean;
begin
    perform pg_advisory_xact_lock(@schema@.wh_member_key(p_instance_id));
    delete from @schema@.wh_service_instances m where m.instance_id = p_instance_id;
    v_member := found;
    if not v_member then
        return false;
    end if;
    insert into @schema@.wh_instance_evictions (instance_id, evicted_by, reason) values (p_instance_id, p_instance_id, 'left')
    on conflict do nothing;
    if @schema@.wh_release_instance(p_instance_id, null) > 0 then
        perform @schema@.wh_ring_members('orphan');
    else
        perform @schema@.wh_ring_members('membership');
    end if;
    return true;
end $wh$;
