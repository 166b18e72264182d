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

-- wh_notify: the one place that notifies. True when it did. A full queue (8 GB by default: some listener sits in a transaction and
-- reads nothing) would fail the commit of whoever rings next, a producer with business of its own; so from half full on nobody rings,
-- and sleepers find their rows by the safety poll. The server's log names the listener. PostgreSQL sends what one transaction rings
-- twice only once: at most one notification a transaction, sleeper and category.
create function @schema@.wh_notify(p_instance_id uuid, p_payload text) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if pg_notification_queue_usage() > 0.5 then
        return false;
    end if;
    perform pg_notify(@schema@.wh_work_channel(p_instance_id), p_payload);
    return true;
end $wh$;

-- wh_ring: rings one instance if it sleeps; true when it did.
create function @schema@.wh_ring(p_instance_id uuid, p_payload text) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return not pg_try_advisory_xact_lock_shared(@schema@.wh_arm_key(p_instance_id)) and @schema@.wh_notify(p_instance_id, p_payload);
end $wh$;

-- wh_taker: the members that can be sent work: accepting and alive, and of which categories (null: all). The lock table is read only for
-- a member whose heartbeat alone does not prove it alive. A view, since a function call for each store would cost as much as the look
-- itself.
--
-- Who routes takes only those that run the category: `category = any (categories) is not false`. A ring at somebody who cannot claim the
-- row is lost, for whoever could sleeps on.
create view @schema@.wh_taker as
select m.instance_id, m.categories
from @schema@.wh_service_instances m
where m.accepts_work
  and case when m.last_heartbeat_at >= @schema@.wh_stale_before(pg_catalog.clock_timestamp(),
      pg_catalog.clock_timestamp() - interval '30 seconds', m.heartbeat_interval_seconds) then true else @schema@.wh_lock_held(m.instance_id) end;

-- wh_takers: those of one category (null: whatever they run), in the order that partitions count by; null when there are none.
create function @schema@.wh_takers(p_category text) returns uuid[]
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return (select array_agg(t.instance_id order by t.instance_id) from @schema@.wh_taker t
            where p_category = any (t.categories) is not false);
end $wh$;

-- wh_share: whose share a stream is while it has no owner among the takers.
create function @schema@.wh_share(p_stream_id uuid, p_takers uuid[]) returns uuid
language sql immutable parallel safe
return p_takers[1 + @schema@.compute_partition(p_stream_id, 10000) % pg_catalog.cardinality(p_takers)];

-- wh_route: to whom the streams belong: the owner if it is among the takers, else one taker by partition. Distinct; nulls are no stream.
create function @schema@.wh_route(p_stream_ids uuid[], p_takers uuid[]) returns setof uuid
language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return query
    select distinct case when a.assigned_instance_id = any (p_takers) then a.assigned_instance_id
        else @schema@.wh_share(s.id, p_takers) end
    from unnest(p_stream_ids) s (id)
    left join lateral (select * from @schema@.wh_active_streams k where k.stream_id = s.id offset 0) a on true
    where s.id is not null;
end $wh$;

-- wh_ring_members: rings every member that is alive, asleep or not: for what changes the membership.
create function @schema@.wh_ring_members(p_payload text) returns void
language sql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select @schema@.wh_notify(l.instance_id, p_payload) from @schema@.wh_live_instances l where l.alive
$wh$;

-- wh_ring_armed: rings every taker that sleeps: rows came free that belong to nobody in particular. A payload that is a category rings
-- those that run it, any other one (`orphan`: rows of several) all of them.
create function @schema@.wh_ring_armed(p_payload text) returns void
language sql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select @schema@.wh_ring(t.id, p_payload)
    from unnest(@schema@.wh_takers(case when p_payload in ('outbox', 'inbox', 'perspective_event', 'receptor') then p_payload end)) t (id)
$wh$;

-- wh_pass_ring: for an instance that was rung, or sees more work, and has no permits. It cannot know what rang it, so for each category
-- that it runs one sleeping peer is rung that runs it too; one that runs several of them stands for all of these. Says whom. Peers that
-- have no permits either are left out, or two of them would ring each other for ever. A category for which nobody is rung: none of its
-- takers sleeps, so all of them will look again anyway.
create function @schema@.wh_pass_ring(p_me uuid) returns uuid[]
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_left text[] := coalesce((select m.categories from @schema@.wh_service_instances m where m.instance_id = p_me),
        array['outbox', 'inbox', 'perspective_event', 'receptor']);
    v_shared text[];
    v_rung uuid[] := '{}';
    v_peer record;
begin
    for v_peer in
        select t.instance_id as id, t.categories from @schema@.wh_taker t
        where t.instance_id <> p_me order by t.instance_id < p_me, t.instance_id
    loop
        exit when v_left = '{}';
        v_shared := array(select c from unnest(v_left) c where c = any (v_peer.categories) is not false);
        if v_shared <> '{}' and pg_try_advisory_xact_lock_shared(@schema@.wh_full_key(v_peer.id))
            and @schema@.wh_ring(v_peer.id, v_shared[1])
        then
            v_rung := v_rung || v_peer.id;
            v_left := array(select c from unnest(v_left) c where c <> all (v_shared));
        end if;
    end loop;
    return v_rung;
end $wh$;

-- notify_instance_owners: the doorbell by hand: rings, asleep or not, the live owner of each stream if it runs the category; streams
-- without such a one share one taker each by partition; nobody alive runs it: nothing. Returns how many were rung. Null streams ring
-- nobody.
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
    v_takers := @schema@.wh_takers(p_category);
    if v_takers is null then
        return 0;
    end if;
    select count(*) filter (where @schema@.wh_notify(r.id, p_category)) into v_rung from @schema@.wh_route(p_stream_ids, v_takers) r (id);
    return v_rung;
end $wh$;

-- wh_affinity_key: 32 advisory keys that share out the streams among the producers that note them.
create function @schema@.wh_affinity_key(p_stream_id uuid) returns bigint
language sql immutable parallel safe
return pg_catalog.hashtextextended('workpump affinity ' || @schema_text@, @schema@.compute_partition(p_stream_id, 32));

-- wh_note_streams_new: gives new streams their affinity row, in stream order, without ever waiting: two producers that store new streams
-- A, B and B, A would deadlock on the key. Who does not get a stream's share of the key space skips it: a missing row only means routing
-- by partition, and the next store tries again. Above READ COMMITTED a row committed meanwhile would fail the producer, so none is written.
create function @schema@.wh_note_streams_new(p_stream_ids uuid[]) returns void
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if current_setting('transaction_isolation') = 'read committed' then
        insert into @schema@.wh_active_streams (stream_id)
        select s.id from unnest(p_stream_ids) s (id)
        where pg_try_advisory_xact_lock(@schema@.wh_affinity_key(s.id))
        order by s.id
        on conflict do nothing;
    end if;
end $wh$;

-- wh_many_arrived: rings and notes for a statement that stored several rows. p_stream_ids: their streams, each once, null among them for
-- unordered rows. One probe for each stream, whatever the planner thinks of a thousand of them.
create function @schema@.wh_many_arrived(p_category text, p_stream_ids uuid[], p_bells boolean) returns void
language plpgsql set search_path = pg_catalog, @schema@, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $wh$
declare
    v_takers constant uuid[] := case when p_bells then @schema@.wh_takers(p_category) end;
    v_targets uuid[];
    v_missing uuid[];
    v_target uuid;
begin
    select array_agg(s.id) filter (where s.id is not null and a.stream_id is null),
        array_agg(distinct case when s.id is null then v_takers[1]
            when a.assigned_instance_id = any (v_takers) then a.assigned_instance_id
            else @schema@.wh_share(s.id, v_takers) end)
    into v_missing, v_targets
    from unnest(p_stream_ids) s (id) left join @schema@.wh_active_streams a on a.stream_id = s.id;
    if v_missing is not null then
        perform @schema@.wh_note_streams_new(v_missing);
    end if;
    if v_takers is not null then
        foreach v_target in array v_targets loop
            perform @schema@.wh_ring(v_target, p_category);
        end loop;
    end if;
end $wh$;

-- wh_work_arrived: runs once per INSERT statement on a work table, after it; its argument is the category. It rings the takers of the
-- rows, if they sleep, those of scheduled rows too: who sleeps has to learn of the new due time. Unordered rows are one queue, and its
-- taker is the oldest member that runs the category. `workpump.skip_doorbells` = on leaves the ringing out: a prepared transaction cannot carry a NOTIFY, the
-- safety poll finds its rows.
--
-- Every INSERT pays for this, most of them store one row, and 64 busy sessions pay several times over, out of cold caches. So one row
-- takes three statements at most, each a probe by key, and nothing is called that can be spelled out.
create function @schema@.wh_work_arrived() returns trigger
language plpgsql set search_path = pg_catalog, @schema@, pg_temp
-- A plan made for an empty table would read the whole of a full one for each row. Without jit: a scan ruled out by its cost, here or in
-- a function called from here, would be compiled at every call; wh_takers took half a second.
set enable_seqscan = off set jit = off
as $wh$
declare
    v_category constant text := tg_argv[0];
    v_bells constant boolean := lower(coalesce(current_setting('workpump.skip_doorbells', true), ''))
        not in ('on', 'true', 'yes', '1');
    v_streams uuid[];
    v_stream uuid;
    v_known uuid;
    v_target uuid;
begin
    select array_agg(n.stream_id) into v_streams from (select a.stream_id from arrived a limit 2) n;
    if v_streams is null then
        return null;
    elsif array_length(v_streams, 1) > 1 then
        perform @schema@.wh_many_arrived(v_category, array(select distinct a.stream_id from arrived a), v_bells);
        return null;
    end if;
    v_stream := v_streams[1];
    if v_stream is not null then
        select a.stream_id, t.instance_id into v_known, v_target
        from @schema@.wh_active_streams a left join @schema@.wh_taker t
            on t.instance_id = a.assigned_instance_id and v_category = any (t.categories) is not false
        where a.stream_id = v_stream;
        if v_known is null then
            perform @schema@.wh_note_streams_new(v_streams);
        end if;
    end if;
    if not v_bells then
        return null;
    elsif v_stream is null then
        select t.instance_id into v_target from @schema@.wh_taker t
        where v_category = any (t.categories) is not false order by t.instance_id limit 1;
    elsif v_target is null then
        v_target := @schema@.wh_share(v_stream, @schema@.wh_takers(v_category));
    end if;
    if v_target is not null and not pg_try_advisory_xact_lock_shared(@schema@.wh_arm_key(v_target)) then
        perform @schema@.wh_notify(v_target, v_category);
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
