-- Claiming: the one way a row becomes somebody's.
--
-- `stream_id is null` does not count as a constant for the planner, so every walk of an index names the whole of its order.
--
-- Every category has the same functions, made from one template:
--   wh_promote_…        rows whose time has come (due schedule, expired lease) become fresh again
--   wh_walk_…           the next streams of the rotation that look free, with their buckets locked
--   wh_lock_runs_…      the runs of such streams, read in a new snapshot and locked
--   wh_pick_streams_…   both, until enough rows are found
--   wh_pick_unordered_… rows without a stream, oldest first
--   wh_claim_…          leases what was picked; claim_orphaned_… is the same by itself
--
-- What keeps a stream on one instance, in order (each shortcut was seen to break):
--   1. a stream is weighed only under its bucket's try-lock, so two claims never weigh it at once;
--   2. its rows are read in a snapshot taken after that lock;
--   3. any leased row blocks the stream, whoever holds it, and so does a parked row before its first fresh one;
--   4. rows are locked with SKIP LOCKED and checked again under the lock, and the run ends at the first one that is missing.
-- Nothing here ever waits for a lock.

create type @schema@.claimed_work as (
    category         text,
    work_id          uuid,
    stream_id        uuid,
    partition_number int,
    claim_epoch      bigint,
    attempts         int,
    crash_count      int,
    lease_expiry     timestamptz,
    seq              bigint,
    name             text,
    message_type     text,
    event_id         uuid,
    payload          jsonb,
    metadata         jsonb
);

-- Refuses limits that cannot work, and an isolation level in which the proofs of a claim do not hold.
create function @schema@.wh_check_claim(p_max_rows int, p_lease_seconds int, p_partition_count int, p_stream_run int, p_max_bytes bigint)
returns void language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if p_max_rows is null or p_max_rows < 1 or p_lease_seconds is null or p_lease_seconds < 1 or p_partition_count is null
       or p_partition_count < 1 or p_stream_run is null or p_stream_run < 1 or p_max_bytes is null or p_max_bytes < 1 then
        raise exception 'claim_work: every limit must be at least 1, got max_rows %, lease_seconds %, partition_count %, stream_run %, max_bytes %',
            p_max_rows, p_lease_seconds, p_partition_count, p_stream_run, p_max_bytes using errcode = '22023',
            hint = 'Leave a limit out to get its default.';
    end if;
    if p_max_rows > 1000000 then
        raise exception 'claim_work: max_rows must be at most 1000000, got %', p_max_rows using errcode = '22023',
            hint = 'Claim again while the notice whizbang.has_more=true comes.';
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claim_work needs read committed, not %', current_setting('transaction_isolation') using errcode = '25001',
            hint = 'Its proofs need a new snapshot for every statement.';
    end if;
end $wh$;

-- Refuses whoever is not a member, and keeps the member from being evicted until this transaction ends. A tombstone check alone
-- leaves leases on the evicted id. False: an evictor has the member row right now, so claim nothing this time.
create function @schema@.wh_hold_member(p_instance_id uuid) returns boolean
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform 1 from @schema@.wh_service_instances where instance_id = p_instance_id for key share skip locked;
    if found then
        return true;
    end if;
    if exists (select from @schema@.wh_instance_evictions where instance_id = p_instance_id) then
        raise exception 'instance % was evicted', p_instance_id using errcode = 'WH001',
            hint = 'Stop, and come back under a fresh instance id.';
    end if;
    if not exists (select from @schema@.wh_service_instances where instance_id = p_instance_id) then
        raise exception 'instance % is not registered', p_instance_id using errcode = 'WH003',
            hint = 'Call record_heartbeat first.';
    end if;
    return false;
end $wh$;

-- The place of an instance among the members that accept work and are not stale: its rank from 0, and their number.
create function @schema@.wh_member_rank(p_instance_id uuid, out member_rank int, out members int)
language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    select (count(*) filter (where m.instance_id < p_instance_id))::int, greatest(count(*), 1)::int into member_rank, members
    from @schema@.wh_service_instances m
    where m.accepts_work
      and m.last_heartbeat_at > clock_timestamp() - make_interval(secs => greatest(30, 2 * coalesce(m.heartbeat_interval_seconds, 0) + 5));
end $wh$;

-- The advisory key that stands for a stream while a claim weighs it. Streams share 1 024 keys, because a lock for each of thousands of
-- streams would fill the server's lock table.
create function @schema@.wh_bucket(p_category text, p_stream_id uuid, p_lane text) returns bigint
language sql immutable parallel safe
return hashtextextended('workpump bucket ' || @schema_text@ || ' ' || p_category,
                        uuid_hash_extended(p_stream_id, hashtextextended(p_lane, 0)) & 1023);

-- What a body weighs once it is read: compressed values are measured by what they unpack to.
create function @schema@.wh_body_size(p_payload jsonb, p_metadata jsonb) returns bigint
language sql stable parallel safe
return (case when pg_column_compression(p_payload) is null then pg_column_size(p_payload) else octet_length(p_payload::text) end
        + coalesce(pg_column_size(p_metadata), 0))::bigint;

-- Whether an instance should take a stream before others do: its own stream, else its share of those that nobody serves.
create function @schema@.wh_prefers(p_stream_id uuid, p_instance_id uuid, p_rank int, p_members int, p_partition_count int) returns boolean
language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    return coalesce(
        (select a.assigned_instance_id = p_instance_id from @schema@.wh_active_streams a
         where a.stream_id = p_stream_id and a.assigned_instance_id is not null and a.lease_expiry > clock_timestamp()),
        @schema@.compute_partition(p_stream_id, p_partition_count) % p_members = p_rank);
end $wh$;

-- Remembers who serves a stream. A hint for doorbells and preference, so rows that are locked are left alone, and a stream of one's
-- own is written again only when half its time is over.
create function @schema@.wh_note_streams(p_streams uuid[], p_instance_id uuid, p_expiry timestamptz) returns void
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    update @schema@.wh_active_streams
    set assigned_instance_id = p_instance_id, lease_expiry = p_expiry, last_activity_at = clock_timestamp()
    where stream_id = any (array(
        select a.stream_id from @schema@.wh_active_streams a
        where a.stream_id = any (p_streams)
          and (a.assigned_instance_id is null
               or a.assigned_instance_id = p_instance_id
                  and (a.lease_expiry is null or a.lease_expiry < clock_timestamp() + (p_expiry - clock_timestamp()) / 2)
               or a.assigned_instance_id <> p_instance_id
                  and not exists (select from @schema@.wh_service_instances m where m.instance_id = a.assigned_instance_id))
        order by a.stream_id for update of a skip locked));
end $wh$;

do $wh_make$
declare
    -- {x} suffix, {category} name, {t} table, {key} key column, {done} done column, {lane} second order column or '', {ord} order key,
    -- {eq(a,b)} table row a has the order key of (b.stream_id, b.lane), {same(a,b)} two table rows have the same order key,
    -- {free(c,h)} nothing held blocks the order key of c
    -- before h.seq, {beyond(a,s,l)} order key of a comes after (s, l), {upto(a,s,l)} is not after it, {bytes(a)} size of a body, {columns} the result
    c_template constant text := $wh_template$

create function @schema@.wh_promote_{x}(p_now timestamptz, p_since timestamptz, p_limit int) returns int
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_owner uuid;
    v_count int;
    v_total int;
begin
    update {t} set scheduled_for = null
    where {key} = any (array(
        select {key} from {t}
        where {done} is null and claimable_at is not null and instance_id is null
          and claimable_at > p_since and claimable_at <= p_now
        order by instance_id, claimable_at limit p_limit for update skip locked));
    get diagnostics v_total = row_count;
    loop
        select t.instance_id into v_owner from {t} t
        where t.{done} is null and t.claimable_at is not null and t.instance_id is not null
          and t.instance_id > coalesce(v_owner, '00000000-0000-0000-0000-000000000000')
        order by t.instance_id limit 1;
        exit when not found or v_total >= p_limit;
        -- Only the row at the head of its order key can have been running: it alone is charged with the crash.
        update {t} t
        set instance_id = null, lease_expiry = null, scheduled_for = null,
            (crash_count, failure_reason, error) = (
                select t.crash_count + was_head::int,
                       case when was_head then coalesce(t.failure_reason, 6) else t.failure_reason end,
                       case when was_head and t.error is null
                            then format('abandoned: the lease of instance %s ran out', v_owner) else t.error end
                from (select t.stream_id is null
                             or not exists (select from {t} e where {same(e,t)} and e.{done} is null and e.claimable_at is null
                                            and e.seq < t.seq)
                            and not exists (select from {t} e where {same(e,t)} and e.{done} is null and e.instance_id is not null
                                            and e.seq < t.seq)
                            and not exists (select from {t} e where {same(e,t)} and e.{done} is null and e.instance_id is null
                                            and e.claimable_at is not null and e.seq < t.seq) as was_head) h)
        where t.{key} = any (array(
            select d.{key} from {t} d
            where d.{done} is null and d.claimable_at is not null and d.instance_id = v_owner
              and d.claimable_at > p_since and d.claimable_at <= p_now
            order by d.instance_id, d.claimable_at limit p_limit - v_total for update skip locked));
        get diagnostics v_count = row_count;
        v_total := v_total + v_count;
    end loop;
    return v_total;
end $wh$;

-- Whether a claim could find anything: one indexed probe for each of unordered rows, streams, due schedules and expired leases.
create function @schema@.wh_claimable_{x}(p_now timestamptz, p_since timestamptz, p_front bigint) returns boolean
language plpgsql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_owner uuid := '00000000-0000-0000-0000-000000000000';
begin
    if exists (select from {t} where {done} is null and claimable_at is null and stream_id is null and seq > p_front) then
        return true;
    end if;
    if exists (select from {t} where {done} is null and claimable_at is null and stream_id is not null) then
        return true;
    end if;
    if exists (select from {t} where {done} is null and claimable_at is not null and instance_id is null
               and claimable_at > p_since and claimable_at <= p_now) then
        return true;
    end if;
    loop
        select o.instance_id into v_owner from {t} o
        where o.{done} is null and o.claimable_at is not null and o.instance_id > v_owner
        order by o.instance_id limit 1;
        exit when not found;
        if exists (select from {t} d where d.{done} is null and d.claimable_at is not null
                   and d.instance_id = v_owner and d.claimable_at > p_since and d.claimable_at <= p_now) then
            return true;
        end if;
    end loop;
    return false;
end $wh$;

-- Visits the next p_visits streams after (p_stream, p_lane) and up to (p_until, p_until_lane) that have a fresh row. Returns those that
-- look free and whose bucket this transaction could lock, the place it came to, and how many it visited.
create function @schema@.wh_walk_{x}(
    inout p_stream uuid, inout p_lane text, p_until uuid, p_until_lane text, p_visits int,
    p_prefer boolean, p_instance_id uuid, p_rank int, p_members int, p_partition_count int,
    out visited int, out streams uuid[], out lanes text[]
) language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    with recursive walk as (
        (select 1 as n, w.stream_id, {lane(w)} as lane, w.seq from {t} w
         where w.{done} is null and w.claimable_at is null and {beyond(w,p_stream,p_lane)} and {upto(w,p_until,p_until_lane)}
         order by {ord(w)}, w.seq limit 1)
        union all
        select walk.n + 1, s.stream_id, s.lane, s.seq
        from walk cross join lateral (
            select w.stream_id, {lane(w)} as lane, w.seq from {t} w
            where w.{done} is null and w.claimable_at is null and {beyond(w,walk.stream_id,walk.lane)} and {upto(w,p_until,p_until_lane)}
            order by {ord(w)}, w.seq limit 1) s
        where walk.n < p_visits
    ), free as materialized (
        select walk.n, walk.stream_id, walk.lane from walk
        where {free(walk,walk)}
          and (not p_prefer or @schema@.wh_prefers(walk.stream_id, p_instance_id, p_rank, p_members, p_partition_count))
    ), locked as materialized (
        select n, stream_id, lane from free
        where pg_try_advisory_xact_lock(@schema@.wh_bucket('{category}', stream_id, lane))
    ), place as (
        select stream_id, lane, n from walk order by n desc limit 1
    )
    select coalesce((select n from place), 0), coalesce((select stream_id from place), p_stream), coalesce((select lane from place), p_lane),
           array_agg(l.stream_id order by l.n), array_agg(l.lane order by l.n)
    into visited, p_stream, p_lane, streams, lanes
    from locked l;
end $wh$;

-- Locks the runs of streams whose buckets are held, at most p_rows rows and p_bytes bytes in all. Returns the keys in order, what they
-- weigh, and how many of the streams were looked at before the budget was used up.
create function @schema@.wh_lock_runs_{x}(
    p_streams uuid[], p_lanes text[], p_rows int, p_run int, p_bytes bigint, out keys uuid[], out bytes bigint, out reached int
) language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    with cand as (
        select c.stream_id, c.lane, c.n::int as n from unnest(p_streams, p_lanes) with ordinality as c (stream_id, lane, n)
    ), head as (
        select c.n, c.stream_id, c.lane, h.seq,
               (select k.seq from {t} k where {eq(k,c)} and k.{done} is null and k.instance_id is null and k.claimable_at is not null
                and k.seq > h.seq order by {ord(k)}, k.seq limit 1) as parked
        from cand c
        cross join lateral (select f.seq from {t} f where {eq(f,c)} and f.{done} is null and f.claimable_at is null
                            order by {ord(f)}, f.seq limit 1) h
        where {free(c,h)}
    ), run as materialized (
        -- A row that took its process down three times runs alone.
        select head.n, r.id, r.seq, row_number() over w as place, sum((r.crash_count >= 3)::int) over w as suspects
        from head cross join lateral (
            select f.{key} as id, f.seq, f.crash_count from {t} f
            where {eq(f,head)} and f.{done} is null and f.claimable_at is null
              and f.seq >= head.seq and f.seq < coalesce(head.parked, 9223372036854775807)
            order by {ord(f)}, f.seq
            limit least(p_run, 2::bigint * p_rows / cardinality(p_streams) + 1)) r
        window w as (partition by head.n order by r.seq)
    ), locked as materialized (
        select run.n, run.id, run.seq, run.place, l.weight
        from run cross join lateral (
            select {bytes(t)} as weight from {t} t
            -- Not as `is null`: a plan made while few rows were fresh would walk that whole index for every key.
            where t.{key} = run.id and num_nonnulls(t.{done}, t.claimable_at) = 0 for update skip locked) l
        where run.suspects = 0 or run.place = 1
    ), prefix as (
        select n, id, seq, weight, place = row_number() over (partition by n order by seq) as whole from locked
    ), fit as (
        select n, id, seq, weight, row_number() over (order by n, seq) as place, sum(weight) over (order by n, seq) - weight as before
        from prefix where whole
    )
    select array_agg(id order by n, seq), coalesce(sum(weight), 0), coalesce(max(n), 0)
    into keys, bytes, reached
    from fit where fit.place <= p_rows and fit.before < p_bytes;
end $wh$;

-- Locks up to p_rows rows of streams, going on in the rotation from (p_stream, p_lane) and round once. A claimable stream is reached
-- within one round of the streams that have fresh rows.
create function @schema@.wh_pick_streams_{x}(
    inout p_stream uuid, inout p_lane text, inout p_bytes bigint, p_rows int, p_run int, p_visits int,
    p_prefer boolean, p_instance_id uuid, p_rank int, p_members int, p_partition_count int, out keys uuid[], out streams uuid[]
) language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    c_end    constant uuid := 'ffffffff-ffff-ffff-ffff-ffffffffffff';
    -- The largest uuid is a stream too, and its lanes come after ''.
    v_end_lane text := {last_lane};
    v_start  uuid := p_stream;
    v_start_lane text := p_lane;
    v_rounds int := 0;
    v_chunk  int := greatest(16, p_rows / p_run);
    v_seen   int := 0;
    v_walk   record;
    v_runs   record;
begin
    keys := '{}';
    streams := '{}';
    while v_seen < p_visits and cardinality(keys) < p_rows and p_bytes > 0 loop
        v_walk := @schema@.wh_walk_{x}(
            p_stream, p_lane, case v_rounds when 0 then c_end else v_start end, case v_rounds when 0 then v_end_lane else v_start_lane end, v_chunk,
            p_prefer, p_instance_id, p_rank, p_members, p_partition_count);
        p_stream := v_walk.p_stream;
        p_lane := v_walk.p_lane;
        v_seen := v_seen + v_walk.visited;
        if v_walk.streams is not null then
            v_runs := @schema@.wh_lock_runs_{x}(v_walk.streams, v_walk.lanes, p_rows - cardinality(keys), p_run, p_bytes);
            if v_runs.keys is not null then
                keys := keys || v_runs.keys;
                streams := streams || v_walk.streams[:v_runs.reached];
                p_bytes := p_bytes - v_runs.bytes;
                if cardinality(keys) >= p_rows or p_bytes <= 0 then
                    -- Full: the next claim goes on right behind the last stream taken.
                    p_stream := v_walk.streams[v_runs.reached];
                    p_lane := v_walk.lanes[v_runs.reached];
                    return;
                end if;
            end if;
        end if;
        if v_walk.visited < v_chunk then
            exit when v_rounds = 1;
            v_rounds := 1;
            p_stream := '00000000-0000-0000-0000-000000000000';
            p_lane := '';
        end if;
        -- As many visits as the streams seen so far say are needed for the rest.
        v_chunk := greatest(16, least(1000, (p_rows - cardinality(keys))::bigint * v_seen / greatest(cardinality(keys), v_seen / 2, 1)));
    end loop;
end $wh$;

-- Locks up to p_rows rows without a stream, oldest first from behind p_front.
create function @schema@.wh_pick_unordered_{x}(inout p_front bigint, inout p_bytes bigint, p_rows int, out keys uuid[])
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_last bigint;
    v_size bigint;
begin
    select array_agg(id order by seq), max(seq), coalesce(sum(weight), 0) into keys, v_last, v_size
    from (select id, seq, weight, sum(weight) over (order by seq) - weight as before
          from (select t.{key} as id, t.seq, {bytes(t)} as weight from {t} t
                where t.{done} is null and t.claimable_at is null and t.stream_id is null and t.seq > p_front
                order by t.stream_id, t.seq limit p_rows for update skip locked) l) s
    where before < p_bytes;
    p_front := coalesce(v_last, p_front);
    p_bytes := p_bytes - v_size;
end $wh$;

-- A place to start the rotation at in a session that has no mark: anywhere between the first and the last stream with fresh rows. Always
-- starting with the first would starve the last ones where sessions come and go. The first 15 digits are enough of a stream.
create function @schema@.wh_any_place_{x}() returns uuid
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_first uuid;
    v_last  uuid;
    v_low   bigint;
    v_high  bigint;
begin
    select w.stream_id into v_first from {t} w
    where w.{done} is null and w.claimable_at is null and w.stream_id is not null order by w.stream_id limit 1;
    select w.stream_id into v_last from {t} w
    where w.{done} is null and w.claimable_at is null and w.stream_id is not null order by w.stream_id desc limit 1;
    v_low := ('x' || left(translate(v_first::text, '-', ''), 15))::bit(60)::bigint;
    v_high := ('x' || left(translate(v_last::text, '-', ''), 15))::bit(60)::bigint;
    return (lpad(to_hex(v_low + floor(random() * (v_high - v_low))::bigint), 15, '0') || repeat('0', 17))::uuid;
end $wh$;

-- Leases fresh rows of one category. Its callers fix the planner's choices: see claim_work.
create function @schema@.wh_claim_{x}(
    p_instance_id uuid, p_lease_seconds int, p_max_rows int, p_stream_run int, p_max_bytes bigint, p_rank int, p_members int,
    p_partition_count int
) returns setof @schema@.claimed_work
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_now    timestamptz := clock_timestamp();
    v_expiry timestamptz := v_now + make_interval(secs => p_lease_seconds);
    -- Where the last claim of this session ended. Only a hint, so any value is safe: a claim that finds nothing starts from the front.
    v_mark   jsonb := coalesce(nullif(current_setting('{mark}', true), '')::jsonb, '{}');
    v_front  bigint := coalesce((v_mark ->> 'seq')::bigint, 0);
    v_since  timestamptz := coalesce((v_mark ->> 'due')::timestamptz - interval '5 seconds', '-infinity');
    v_whole  boolean := coalesce(v_now >= (v_mark ->> 'whole')::timestamptz, true);
    v_stream uuid := (v_mark ->> 'stream')::uuid;
    v_lane   text := coalesce(v_mark ->> 'lane', '');
    v_rows   int := p_max_rows;
    v_bytes  bigint := p_max_bytes;
    v_part   text;
    v_limit  int;
    v_pick   record;
    v_member boolean;
    v_found  boolean;
    v_full   boolean := false;
    v_probe  timestamptz;
    v_cost   interval := '0';
begin
    loop
        if v_whole then
            v_front := 0;
            v_since := '-infinity';
        end if;
        v_probe := clock_timestamp();
        v_found := @schema@.wh_claimable_{x}(v_now, v_since, v_front);
        v_cost := case when v_whole then clock_timestamp() - v_probe end;
        if v_found then
            v_member := coalesce(v_member, @schema@.wh_hold_member(p_instance_id));
            exit when not v_member;
            v_full := @schema@.wh_promote_{x}(v_now, v_since, 1000) >= 1000;
            v_stream := coalesce(v_stream, @schema@.wh_any_place_{x}(), '00000000-0000-0000-0000-000000000000');
            -- Half of the rows for unordered work, then streams (those to be preferred, then whoever is next), then what is left over.
            foreach v_part in array array['half', 'preferred', 'streams', 'rest'] loop
                v_limit := case v_part when 'half' then (v_rows + 1) / 2 when 'preferred' then v_rows / 2 else v_rows end;
                continue when v_limit = 0 or v_bytes <= 0 or v_part = 'preferred' and p_members < 2;
                if v_part in ('half', 'rest') then
                    v_pick := @schema@.wh_pick_unordered_{x}(v_front, v_bytes, v_limit);
                    v_front := v_pick.p_front;
                else
                    v_pick := @schema@.wh_pick_streams_{x}(v_stream, v_lane, v_bytes, v_limit, p_stream_run, least(greatest(256, 2::bigint * v_limit), 100000)::int,
                        v_part = 'preferred', p_instance_id, p_rank, p_members, p_partition_count);
                    if v_part = 'streams' then
                        v_stream := v_pick.p_stream;
                        v_lane := v_pick.p_lane;
                    end if;
                    perform @schema@.wh_note_streams(v_pick.streams, p_instance_id, v_expiry) where v_pick.streams <> '{}';
                end if;
                v_bytes := v_pick.p_bytes;
                continue when coalesce(cardinality(v_pick.keys), 0) = 0;
                v_rows := v_rows - cardinality(v_pick.keys);
                return query update {t} t
                    set instance_id = p_instance_id, lease_expiry = v_expiry, claim_epoch = t.claim_epoch + 1, attempts = t.attempts + 1
                    where t.{key} = any (v_pick.keys)
                    returning {columns};
            end loop;
        end if;
        exit when v_whole or v_rows < p_max_rows;
        v_whole := true;
    end loop;

    if v_bytes <= 0 then
        perform set_config('workpump.cut', 'on', true);
    end if;
    perform set_config('{mark}', jsonb_build_object(
        'seq', v_front, 'stream', v_stream, 'lane', v_lane,
        -- More has come due than was promoted: the next claim goes on there.
        'due', case when not v_full then v_now when v_since > '-infinity' then (v_mark ->> 'due')::timestamptz end,
        -- The way to the front, past what is dead but not yet removed, takes one part in a hundred of the time at most. It comes once a
        -- second at most and, where it is short, at least: retried and handed back rows lie behind the mark.
        'whole', case when v_whole then clock_timestamp() + least(greatest(interval '1 second', 100 * v_cost), interval '30 seconds')
                      else (v_mark ->> 'whole')::timestamptz end)::text, false);
end $wh$;

-- The part of claim_work for one category, by itself.
create function @schema@.claim_orphaned_{x}(
    p_instance_id uuid, p_lease_seconds int default 300, p_max_rows int default 1000, p_stream_run int default 100,
    p_max_bytes bigint default 16777216, p_rank int default 0, p_members int default 1, p_partition_count int default 10000
) returns setof @schema@.claimed_work
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan as $wh$
begin
    perform @schema@.wh_check_claim(p_max_rows, p_lease_seconds, p_partition_count, p_stream_run, p_max_bytes);
    return query select * from @schema@.wh_claim_{x}(
        p_instance_id, p_lease_seconds, p_max_rows, p_stream_run, p_max_bytes, p_rank, p_members, p_partition_count);
end $wh$;
$wh_template$;
    v_kind record;
    v_sql  text;
begin
    for v_kind in values
        ('outbox', 'outbox', 'wh_outbox', 'message_id', 'processed_at', null,
         't.destination, t.message_type, null::uuid, t.payload, t.metadata'),
        ('inbox', 'inbox', 'wh_inbox', 'message_id', 'processed_at', null,
         't.handler_name, t.message_type, null::uuid, t.payload, t.metadata'),
        ('perspective_events', 'perspective_event', 'wh_perspective_events', 'event_work_id', 'processed_at', 'perspective_name',
         't.perspective_name, null::text, t.event_id, null::jsonb, null::jsonb'),
        ('receptor_work', 'receptor', 'wh_receptor_processing', 'id', 'completed_at', 'receptor_name',
         't.receptor_name, null::text, t.event_id, null::jsonb, null::jsonb')
    loop
        -- `offset 0` keeps each of these a probe of its own: as a join, a plan made while few rows were leased reads them all each time.
        v_sql := regexp_replace(c_template, '\{free\((\w+),(\w+)\)\}', '
              not exists (select from {t} l where {eq(l,\1)} and l.{done} is null and l.instance_id is not null offset 0)
          and not exists (select from {t} k where {eq(k,\1)} and k.{done} is null and k.instance_id is null
                          and k.claimable_at is not null and k.seq < \2.seq offset 0)', 'g');
        if v_kind.column6 is null then
            v_sql := regexp_replace(v_sql, '\{lane\((\w+)\)\}', '''''::text', 'g');
            v_sql := regexp_replace(v_sql, '\{ord\((\w+)\)\}', '\1.stream_id', 'g');
            v_sql := regexp_replace(v_sql, '\{eq\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id', 'g');
            v_sql := regexp_replace(v_sql, '\{same\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id', 'g');
            v_sql := regexp_replace(v_sql, '\{beyond\((\w+),([\w.]+),([\w.]+)\)\}', '\1.stream_id > \2', 'g');
            v_sql := regexp_replace(v_sql, '\{upto\((\w+),([\w.]+),([\w.]+)\)\}', '\1.stream_id <= \2', 'g');
            v_sql := regexp_replace(v_sql, '\{bytes\((\w+)\)\}', '{schema}.wh_body_size(\1.payload, \1.metadata)', 'g');
            v_sql := replace(v_sql, '{last_lane}', quote_literal(''));
        else
            v_sql := regexp_replace(v_sql, '\{lane\((\w+)\)\}', '\1.{lane}', 'g');
            v_sql := regexp_replace(v_sql, '\{ord\((\w+)\)\}', '\1.stream_id, \1.{lane}', 'g');
            v_sql := regexp_replace(v_sql, '\{eq\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id and \1.{lane} = \2.lane', 'g');
            v_sql := regexp_replace(v_sql, '\{same\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id and \1.{lane} = \2.{lane}', 'g');
            v_sql := regexp_replace(v_sql, '\{beyond\((\w+),([\w.]+),([\w.]+)\)\}', '(\1.stream_id, \1.{lane}) > (\2, \3)', 'g');
            v_sql := regexp_replace(v_sql, '\{upto\((\w+),([\w.]+),([\w.]+)\)\}', '(\1.stream_id, \1.{lane}) <= (\2, \3)', 'g');
            v_sql := regexp_replace(v_sql, '\{bytes\((\w+)\)\}', '100', 'g');
            v_sql := replace(v_sql, '{last_lane}', $last$coalesce((
        select w.{lane} from {t} w where w.{done} is null and w.claimable_at is null and w.stream_id = c_end
        order by w.stream_id desc, w.{lane} desc, w.seq desc limit 1), '')$last$);
            v_sql := replace(v_sql, '{lane}', v_kind.column6);
        end if;
        v_sql := replace(v_sql, '{columns}', format(
            '%L::text, t.%I, t.stream_id, {schema}.compute_partition(t.stream_id, p_partition_count), t.claim_epoch, t.attempts,'
            ' t.crash_count, t.lease_expiry, t.seq, %s', v_kind.column2, v_kind.column4, v_kind.column7));
        v_sql := replace(v_sql, '{x}', v_kind.column1);
        v_sql := replace(v_sql, '{category}', v_kind.column2);
        v_sql := replace(v_sql, '{t}', '{schema}.' || v_kind.column3);
        v_sql := replace(v_sql, '{key}', v_kind.column4);
        v_sql := replace(v_sql, '{done}', v_kind.column5);
        -- Per schema, since sessions behind a pooler are shared.
        v_sql := replace(v_sql, '{mark}', 'workpump.mark_' || v_kind.column1 || '_' || left(md5(@schema_text@), 8));
        v_sql := replace(v_sql, '{schema}', quote_ident(@schema_text@));
        execute v_sql;
    end loop;
end $wh_make$;

-- Leases up to p_max_rows rows to a member and returns them with their bodies; order of the result within a stream is by seq.
-- Each category gets an equal share first, so that none starves another, and then what the others left over.
create function @schema@.claim_work(
    p_instance_id uuid, p_max_rows int default 1000, p_lease_seconds int default 300, p_partition_count int default 10000,
    p_categories text[] default null, p_stream_run int default 100, p_max_bytes bigint default 16777216
) returns setof @schema@.claimed_work
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp
-- Every statement of a claim is a walk along one index. With these a plan made for an empty table stays right when it is full, and
-- nothing is planned twice in a session.
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan as $wh$
declare
    c_known  constant text[] := array['outbox', 'inbox', 'perspective_event', 'receptor'];
    v_wanted text[] := coalesce(p_categories, c_known);
    -- Claims never wait for a lock, so they need no order of tables: each starts with another category, else a cap below their number
    -- would starve the last ones.
    v_first  int := floor(random() * 4)::int;
    v_order  text[] := c_known[v_first + 1:] || c_known[:v_first];
    v_hungry text[] := '{}';
    v_unknown text;
    v_rank   record;
    v_left   int := p_max_rows;
    v_share  int;
    v_count  int;
    v_category text;
    v_place  int := 0;
    v_bytes  bigint;
begin
    perform @schema@.wh_check_claim(p_max_rows, p_lease_seconds, p_partition_count, p_stream_run, p_max_bytes);
    select w into v_unknown from unnest(v_wanted) w where w is null or w <> all (c_known) limit 1;
    if found then
        raise exception 'unknown category %', coalesce(quote_literal(v_unknown), 'null') using errcode = 'WH002',
            hint = 'Known categories: outbox, inbox, perspective_event, receptor.';
    end if;
    if exists (select from @schema@.wh_instance_evictions where instance_id = p_instance_id) then
        raise exception 'instance % was evicted', p_instance_id using errcode = 'WH001',
            hint = 'Stop, and come back under a fresh instance id.';
    end if;
    v_rank := @schema@.wh_member_rank(p_instance_id);
    v_bytes := greatest(p_max_bytes / greatest(cardinality(v_wanted), 1), 1);
    perform set_config('workpump.cut', '', true);

    for v_round in 1..2 loop
        foreach v_category in array case v_round when 1 then v_order else v_hungry end loop
            continue when v_round = 1 and v_category <> all (v_wanted);
            v_place := v_place + 1;
            v_share := case v_round when 1 then (v_left - 1) / greatest(cardinality(v_wanted) - v_place + 1, 1) + 1 else v_left end;
            exit when v_share < 1 or v_left < 1;
            if v_category = 'outbox' then
                return query select * from @schema@.wh_claim_outbox(p_instance_id, p_lease_seconds, v_share, p_stream_run,
                    v_bytes, v_rank.member_rank, v_rank.members, p_partition_count);
            elsif v_category = 'inbox' then
                return query select * from @schema@.wh_claim_inbox(p_instance_id, p_lease_seconds, v_share, p_stream_run,
                    v_bytes, v_rank.member_rank, v_rank.members, p_partition_count);
            elsif v_category = 'perspective_event' then
                return query select * from @schema@.wh_claim_perspective_events(p_instance_id, p_lease_seconds, v_share, p_stream_run,
                    v_bytes, v_rank.member_rank, v_rank.members, p_partition_count);
            else
                return query select * from @schema@.wh_claim_receptor_work(p_instance_id, p_lease_seconds, v_share, p_stream_run,
                    v_bytes, v_rank.member_rank, v_rank.members, p_partition_count);
            end if;
            get diagnostics v_count = row_count;
            v_left := v_left - v_count;
            if v_count >= v_share then
                v_hungry := v_hungry || v_category;
            end if;
        end loop;
        exit when v_left < 1 or v_hungry = '{}';
    end loop;
    if v_left < 1 or current_setting('workpump.cut', true) = 'on' then
        raise notice 'whizbang.has_more=true';
    end if;
end $wh$;
