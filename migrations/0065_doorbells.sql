-- Doorbells: who is woken when work arrives.
--
-- The rule: a producer rings only a consumer that sleeps. Sleeping is an exclusive advisory lock (the arm lock); a producer tries it
-- shared. Got it: the consumer is awake, and cannot fall asleep before this transaction's rows are visible. Not got: it sleeps, ring.
-- Always ringing costs three quarters of the commits/s (NOTIFY takes one server-wide lock at commit); "ring when the stream was empty"
-- loses wakes. Payloads name a category and carry no data.

-- wh_work_channel: where an instance listens: `wh_work_<uuid>`, outside schema public with a tag of the schema's name, so that two pumps
-- in one database do not wake each other. 44 or 61 characters: LISTEN cuts off what exceeds 63, and NOTIFY refuses it.
create function @schema@.wh_work_channel(p_instance_id uuid) returns text
language sql immutable parallel safe
return 'wh_work_' || case when @schema_text@ = 'public' then ''
    else pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(@schema_text@, 0)), 16, '0') || '_' end || p_instance_id::text;

-- wh_arm_key: the advisory key of an instance's arm lock. The consumer holds it exclusively while it sleeps.
create function @schema@.wh_arm_key(p_instance_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump arm ' || @schema_text@ || ' ' || p_instance_id::text, 0);

-- wh_full_key: the advisory key of a sleeper that can take nothing and only passes rings on.
create function @schema@.wh_full_key(p_instance_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump full ' || @schema_text@ || ' ' || p_instance_id::text, 0);

-- wh_ring: rings one instance if it sleeps; true when it did.
create function @schema@.wh_ring(p_instance_id uuid, p_payload text) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if pg_try_advisory_xact_lock_shared(@schema@.wh_arm_key(p_instance_id)) then
        return false;
    end if;
    perform pg_notify(@schema@.wh_work_channel(p_instance_id), p_payload);
    return true;
end $wh$;

-- wh_takers: the members that can be sent work, in the order that partitions count by: accepting and alive. The lock table is read only
-- for a member whose heartbeat alone does not prove it alive.
create function @schema@.wh_takers() returns uuid[]
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_now constant timestamptz := clock_timestamp();
begin
    return (
        select array_agg(m.instance_id order by m.instance_id)
        from @schema@.wh_service_instances m
        where m.accepts_work
          and case when m.last_heartbeat_at >= @schema@.wh_stale_before(v_now, v_now - interval '30 seconds', m.heartbeat_interval_seconds)
              then true else @schema@.wh_lock_held(m.instance_id) end);
end $wh$;

-- wh_route: to whom the streams belong: the owner if it is among the takers, else one taker by partition. Distinct; nulls are no stream.
create function @schema@.wh_route(p_stream_ids uuid[], p_takers uuid[]) returns setof uuid
language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return query
    select distinct case when a.assigned_instance_id = any (p_takers) then a.assigned_instance_id
        else p_takers[1 + @schema@.compute_partition(s.id, 10000) % cardinality(p_takers)] end
    from unnest(p_stream_ids) s (id)
    left join lateral (select * from @schema@.wh_active_streams k where k.stream_id = s.id offset 0) a on true
    where s.id is not null;
end $wh$;

-- wh_ring_members: rings every member that is alive, asleep or not: for what changes the membership.
create function @schema@.wh_ring_members(p_payload text) returns void
language sql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select pg_notify(@schema@.wh_work_channel(l.instance_id), p_payload) from @schema@.wh_live_instances l where l.alive
$wh$;

-- wh_ring_armed: rings every taker that sleeps: rows came free that belong to nobody in particular.
create function @schema@.wh_ring_armed(p_payload text) returns void
language sql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select @schema@.wh_ring(t.id, p_payload) from unnest(@schema@.wh_takers()) t (id)
$wh$;

-- wh_pass_ring: for an instance that was rung, or sees more work, and has no permits: rings one sleeping peer, and says whom. Peers that
-- have none either are left out, or two of them would ring each other for ever. Null: nobody sleeps, so everybody will look again anyway.
create function @schema@.wh_pass_ring(p_me uuid, p_payload text) returns uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_peer uuid;
begin
    for v_peer in
        select t.id from unnest(@schema@.wh_takers()) t (id) where t.id <> p_me order by t.id < p_me, t.id
    loop
        if pg_try_advisory_xact_lock_shared(@schema@.wh_full_key(v_peer)) and @schema@.wh_ring(v_peer, p_payload) then
            return v_peer;
        end if;
    end loop;
    return null;
end $wh$;

-- notify_instance_owners: the doorbell by hand: rings, asleep or not, the live owner of each stream; streams without one share one taker
-- each by partition; nobody alive: nothing. Returns how many were rung. Null streams ring nobody.
create function @schema@.notify_instance_owners(p_category text, p_stream_ids uuid[]) returns int
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_takers uuid[];
    v_rung int;
begin
    if p_category is null or p_category not in ('outbox', 'inbox', 'perspective_event', 'receptor') then
        raise exception using errcode = 'WH002', message = format('unknown category %s', coalesce(quote_literal(p_category), 'null')),
            hint = 'use outbox, inbox, perspective_event or receptor';
    end if;
    v_takers := @schema@.wh_takers();
    if v_takers is null then
        return 0;
    end if;
    select count(pg_notify(@schema@.wh_work_channel(r.id), p_category)) into v_rung from @schema@.wh_route(p_stream_ids, v_takers) r (id);
    return v_rung;
end $wh$;

-- wh_affinity_key: 32 advisory keys that share out the streams among the producers that note them.
create function @schema@.wh_affinity_key(p_stream_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump affinity ' || @schema_text@, @schema@.compute_partition(p_stream_id, 32));

-- wh_work_arrived: runs once per INSERT statement on a work table, after it; its argument is the category.
--
-- Ringing: the takers of the rows, if they sleep. Unordered rows of a category are one queue and ring one taker. A row that is not due
-- yet rings too: a sleeper knows the due times there were when it fell asleep, and looks at them again.
-- `workpump.skip_doorbells` = on leaves it out: a prepared transaction cannot carry a NOTIFY, the safety poll finds its rows.
--
-- Affinity: new streams get their row, in stream order, without ever waiting: two producers that store new streams A, B and B, A would
-- deadlock on the key. Who does not get a stream's share of the key space skips it: a missing row only means routing by partition, and
-- the next store tries again. Above READ COMMITTED a row committed meanwhile would fail the producer, so none is written.
--
-- It is paid for at every INSERT, hence few statements and no calls: wh_takers, wh_route and wh_ring are spelled out.
create function @schema@.wh_work_arrived() returns trigger
language plpgsql set search_path = pg_catalog, @schema@, pg_temp
-- A probe per stream, always: a plan made for a thousand rows, or for an empty table, would read the whole table for each single row.
-- Without jit: a scan ruled out by its cost would be compiled at every call.
set enable_seqscan = off set jit = off
as $wh$
declare
    v_now constant timestamptz := clock_timestamp();
    v_ordered boolean;
    v_unordered boolean;
    v_takers uuid[];
    v_target uuid;
    v_missing uuid[];
    v_sleepers uuid[];
begin
    select exists (select 1 from arrived n where n.stream_id is not null),
        exists (select 1 from arrived n where n.stream_id is null),
        case when lower(coalesce(current_setting('workpump.skip_doorbells', true), '')) not in ('on', 'true', 'yes', '1') then (
            select array_agg(m.instance_id order by m.instance_id)
            from @schema@.wh_service_instances m
            where m.accepts_work
              and case when m.last_heartbeat_at >= @schema@.wh_stale_before(v_now, v_now - interval '30 seconds',
                  m.heartbeat_interval_seconds) then true else @schema@.wh_lock_held(m.instance_id) end
        ) end
    into v_ordered, v_unordered, v_takers;
    if v_unordered and v_takers is not null then
        v_target := v_takers[1 + mod(abs(hashtext(tg_argv[0])::bigint), cardinality(v_takers))::int];
        if not pg_try_advisory_xact_lock_shared(@schema@.wh_arm_key(v_target)) then
            perform pg_notify(@schema@.wh_work_channel(v_target), tg_argv[0]);
        end if;
    end if;
    if not v_ordered then
        return null;
    end if;
    with stream as materialized (
        select distinct n.stream_id as id
        from arrived n
        where n.stream_id is not null
    ), known as materialized (
        select s.id, a.stream_id is null as missing,
            case when a.assigned_instance_id = any (v_takers) then a.assigned_instance_id
                else v_takers[1 + @schema@.compute_partition(s.id, 10000) % cardinality(v_takers)] end as target
        from stream s
        left join lateral (select * from @schema@.wh_active_streams k where k.stream_id = s.id offset 0) a on true
    )
    select (select array_agg(k.id) from known k where k.missing),
        (select array_agg(d.target) from (select distinct k.target from known k where k.target is not null) d
            where not pg_try_advisory_xact_lock_shared(@schema@.wh_arm_key(d.target)))
    into v_missing, v_sleepers;
    if v_missing is not null and current_setting('transaction_isolation') = 'read committed' then
        insert into @schema@.wh_active_streams (stream_id)
        select s.id from unnest(v_missing) s (id)
        where pg_try_advisory_xact_lock(@schema@.wh_affinity_key(s.id))
        order by s.id
        on conflict do nothing;
    end if;
    if v_sleepers is not null then
        perform pg_notify(@schema@.wh_work_channel(t.id), tg_argv[0]) from unnest(v_sleepers) t (id);
    end if;
    return null;
end $wh$;

create trigger wh_work_arrived after insert on @schema@.wh_outbox referencing new table as arrived
    for each statement execute function @schema@.wh_work_arrived('outbox');
create trigger wh_work_arrived after insert on @schema@.wh_inbox referencing new table as arrived
    for each statement execute function @schema@.wh_work_arrived('inbox');
create trigger wh_work_arrived after insert on @schema@.wh_perspective_events referencing new table as arrived
    for each statement execute function @schema@.wh_work_arrived('perspective_event');
create trigger wh_work_arrived after insert on @schema@.wh_receptor_processing referencing new table as arrived
    for each statement execute function @schema@.wh_work_arrived('receptor');
