-- Renewing, handing back what nobody holds, and knowing what comes due next.

do $wh_make$
declare
    c_template constant text := $wh_template$

-- Extends leases that are still held by this claim and have not run out. All rows of a call get one expiry, so a run stays whole. A row
-- that somebody else has locked comes back with a null expiry, and so do the rows of its run behind it, which must not outlive it: not
-- lost, ask again. A row that does not come back is lost.
create function @schema@.wh_renew_{x}(p_instance_id uuid, p_ids uuid[], p_epochs bigint[], p_lease_seconds int)
returns table (work_id uuid, lease_expiry timestamptz)
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $wh$
#variable_conflict use_column
declare
    v_now    timestamptz := clock_timestamp();
    v_expiry timestamptz := v_now + make_interval(secs => p_lease_seconds);
    v_free   uuid[];
    v_done   uuid[];
begin
    select array_agg(l.id) into v_free
    from (select i.id, i.epoch from unnest(p_ids, p_epochs) as i (id, epoch) order by i.id offset 0) i
    cross join lateral (
        select t.{key} as id from {t} t
        where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
          and t.lease_expiry > v_now
        for update skip locked) l;
    with mine as (
        select t.{key} as id, t.stream_id, {lane(t)} as lane, t.seq
        from unnest(v_free) f cross join lateral (select * from {t} t where t.{key} = f) t
    ), gap as materialized (
        -- The first row of each run that is leased and not renewed here.
        select r.stream_id, r.lane,
               (select e.seq from {t} e where {run(e,r)} and e.{done} is null and e.instance_id is not null and e.{key} <> all (v_free)
                order by {ord(e)}, e.seq limit 1) as seq
        from (select distinct stream_id, lane from mine where stream_id is not null) r
    )
    select array_agg(m.id) into v_free from mine m
    where not exists (select from gap g where g.stream_id = m.stream_id and g.lane = m.lane and g.seq < m.seq);
    update {t} t set lease_expiry = v_expiry where t.{key} = any (v_free);
    return query select f, v_expiry from unnest(v_free) f
        union all
        select i.id, null from unnest(p_ids, p_epochs) as i (id, epoch)
        where i.id <> all (coalesce(v_free, '{}'))
          and exists (select from {t} t where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch
                      and t.{done} is null and t.lease_expiry > v_now offset 0);
end $wh$;

-- Hands back, with the attempt refunded, up to p_limit rows that this instance leases and nobody there holds: the answer of a claim was
-- lost, or an actor was. Oldest leases first. Returns how many.
create function @schema@.wh_release_unheld_{x}(p_instance_id uuid, p_held uuid[], p_held_epochs bigint[], p_limit int) returns int
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_count int;
begin
    update {t} t set instance_id = null, lease_expiry = null, attempts = greatest(t.attempts - 1, 0)
    where t.{key} = any (array(
        select u.{key} from {t} u
        where u.instance_id = p_instance_id and u.{done} is null and u.claimable_at is not null
          and not exists (select from unnest(p_held, p_held_epochs) as h (id, epoch) where h.id = u.{key} and h.epoch = u.claim_epoch)
        order by u.claimable_at limit p_limit for update skip locked));
    get diagnostics v_count = row_count;
    return v_count;
end $wh$;

-- The earliest instant at which a held or parked row can be claimed.
create function @schema@.wh_next_due_{x}() returns timestamptz
language sql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
    with recursive owner as (
        (select o.instance_id, o.claimable_at from {t} o where o.{done} is null and o.claimable_at is not null and o.instance_id is not null
         order by o.instance_id, o.claimable_at limit 1)
        union all
        select n.instance_id, n.claimable_at from owner cross join lateral (
            select o.instance_id, o.claimable_at from {t} o
            where o.{done} is null and o.claimable_at is not null and o.instance_id > owner.instance_id
            order by o.instance_id, o.claimable_at limit 1) n
    )
    select least((select min(claimable_at) from owner),
                 (select p.claimable_at from {t} p where p.{done} is null and p.claimable_at is not null and p.instance_id is null
                  order by p.instance_id, p.claimable_at limit 1))
$wh$;
$wh_template$;
    v_kind record;
    v_sql  text;
begin
    for v_kind in values ('outbox', 'wh_outbox', 'message_id', 'processed_at', null), ('inbox', 'wh_inbox', 'message_id', 'processed_at', null),
                         ('perspective_events', 'wh_perspective_events', 'event_work_id', 'processed_at', 'perspective_name'),
                         ('receptor_work', 'wh_receptor_processing', 'id', 'completed_at', 'receptor_name')
    loop
        v_sql := replace(c_template, '{lane(t)}', coalesce('t.' || v_kind.column5, '''''::text'));
        v_sql := replace(v_sql, '{run(e,r)}', 'e.stream_id = r.stream_id' || coalesce(' and e.' || v_kind.column5 || ' = r.lane', ''));
        v_sql := replace(v_sql, '{ord(e)}', 'e.stream_id' || coalesce(', e.' || v_kind.column5, ''));
        v_sql := replace(v_sql, '{x}', v_kind.column1);
        v_sql := replace(v_sql, '{t}', '{schema}.' || v_kind.column2);
        v_sql := replace(v_sql, '{key}', v_kind.column3);
        v_sql := replace(v_sql, '{done}', v_kind.column4);
        v_sql := replace(v_sql, '{schema}', quote_ident(@schema_text@));
        execute v_sql;
    end loop;
end $wh_make$;

-- What the pump uses: fenced, all four categories.
create function @schema@.renew_claims(p_category text, p_instance_id uuid, p_ids uuid[], p_epochs bigint[], p_lease_seconds int default 300)
returns table (work_id uuid, lease_expiry timestamptz)
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
#variable_conflict use_column
begin
    if p_lease_seconds is null or p_lease_seconds < 1 then
        raise exception 'renew_claims: lease_seconds must be at least 1, got %', p_lease_seconds using errcode = '22023',
            hint = 'Leave it out to get 300.';
    end if;
    if cardinality(p_epochs) is distinct from cardinality(p_ids) then
        raise exception 'renew_claims: % ids, % epochs', cardinality(p_ids), cardinality(p_epochs) using errcode = '22023',
            hint = 'Both arrays must have the same length.';
    end if;
    if exists (select from @schema@.wh_instance_evictions e where e.instance_id = p_instance_id) then
        raise exception 'instance % was evicted', p_instance_id using errcode = 'WH001',
            hint = 'Cancel what is running: others have these rows now.';
    end if;
    if p_category = 'outbox' then
        return query select * from @schema@.wh_renew_outbox(p_instance_id, p_ids, p_epochs, p_lease_seconds);
    elsif p_category = 'inbox' then
        return query select * from @schema@.wh_renew_inbox(p_instance_id, p_ids, p_epochs, p_lease_seconds);
    elsif p_category = 'perspective_event' then
        return query select * from @schema@.wh_renew_perspective_events(p_instance_id, p_ids, p_epochs, p_lease_seconds);
    elsif p_category = 'receptor' then
        return query select * from @schema@.wh_renew_receptor_work(p_instance_id, p_ids, p_epochs, p_lease_seconds);
    else
        raise exception 'unknown category %', coalesce(quote_literal(p_category), 'null') using errcode = 'WH002',
            hint = 'Known categories: outbox, inbox, perspective_event, receptor.';
    end if;
end $wh$;

-- A whole batch in one call, categories in their fixed order. `renewed` false: locked, ask again. A row that does not come back is lost.
create function @schema@.renew_work(p_instance_id uuid, p_categories text[], p_ids uuid[], p_epochs bigint[], p_lease_seconds int)
returns table (category text, work_id uuid, renewed boolean)
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
#variable_conflict use_column
declare
    v_part record;
begin
    if cardinality(p_categories) is distinct from cardinality(p_ids) or cardinality(p_epochs) is distinct from cardinality(p_ids) then
        raise exception 'renew_work: % categories, % ids, % epochs', cardinality(p_categories), cardinality(p_ids), cardinality(p_epochs)
            using errcode = '22023', hint = 'All arrays must have the same length.';
    end if;
    for v_part in
        select i.category, array_agg(i.id) as ids, array_agg(i.epoch) as epochs
        from unnest(p_categories, p_ids, p_epochs) as i (category, id, epoch)
        group by i.category
        order by array_position('{outbox,inbox,perspective_event,receptor}', i.category)
    loop
        return query select v_part.category, r.work_id, r.lease_expiry is not null
            from @schema@.renew_claims(v_part.category, p_instance_id, v_part.ids, v_part.epochs, p_lease_seconds) r;
    end loop;
end $wh$;

-- The original form, for operators: not fenced, so it extends the lease whoever holds it. Only rows that are held, unexpired and
-- unprocessed: an expired lease is not revived, since a sweep may be acting on it.
create function @schema@.renew_leases(p_category text, p_ids uuid[], p_lease_seconds int default 300) returns int
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_expiry timestamptz := clock_timestamp() + make_interval(secs => p_lease_seconds);
    v_count  int;
begin
    if p_lease_seconds is null or p_lease_seconds < 1 then
        raise exception 'renew_leases: lease_seconds must be at least 1, got %', p_lease_seconds using errcode = '22023',
            hint = 'Leave it out to get 300.';
    end if;
    if p_category = 'outbox' then
        update @schema@.wh_outbox set lease_expiry = v_expiry
        where message_id = any (array(
            select message_id from @schema@.wh_outbox
            where message_id = any (p_ids) and processed_at is null and lease_expiry > clock_timestamp() order by message_id for update));
    elsif p_category = 'inbox' then
        update @schema@.wh_inbox set lease_expiry = v_expiry
        where message_id = any (array(
            select message_id from @schema@.wh_inbox
            where message_id = any (p_ids) and processed_at is null and lease_expiry > clock_timestamp() order by message_id for update));
    elsif p_category = 'perspective_event' then
        update @schema@.wh_perspective_events set lease_expiry = v_expiry
        where event_work_id = any (array(
            select event_work_id from @schema@.wh_perspective_events
            where event_work_id = any (p_ids) and processed_at is null and lease_expiry > clock_timestamp() order by event_work_id for update));
    else
        raise exception 'unknown category %', coalesce(quote_literal(p_category), 'null') using errcode = 'WH002',
            hint = 'Leases can be renewed for outbox, inbox and perspective_event.';
    end if;
    get diagnostics v_count = row_count;
    return v_count;
end $wh$;

-- Hands back up to 1 000 rows that p_instance_id leases and does not hold. Call it until it returns 0.
create function @schema@.release_unheld(p_instance_id uuid, p_held_ids uuid[], p_held_epochs bigint[]) returns int
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_total int := 0;
begin
    v_total := v_total + @schema@.wh_release_unheld_outbox(p_instance_id, p_held_ids, p_held_epochs, 1000 - v_total);
    v_total := v_total + @schema@.wh_release_unheld_inbox(p_instance_id, p_held_ids, p_held_epochs, 1000 - v_total);
    v_total := v_total + @schema@.wh_release_unheld_perspective_events(p_instance_id, p_held_ids, p_held_epochs, 1000 - v_total);
    v_total := v_total + @schema@.wh_release_unheld_receptor_work(p_instance_id, p_held_ids, p_held_epochs, 1000 - v_total);
    return v_total;
end $wh$;

-- When the next row becomes claimable by time alone: a schedule comes due, or a lease (anyone's) runs out. Null: nothing waits for a time.
-- Only of what the instance declared to run: a row that is due and that it cannot claim would stay due, and hide its own that follow.
create function @schema@.next_claimable_at(p_instance_id uuid) returns timestamptz
language sql stable set search_path = pg_catalog, @schema@, pg_temp as $wh$
    select least(case when 'outbox' = any (m.runs) is not false then @schema@.wh_next_due_outbox() end,
                 case when 'inbox' = any (m.runs) is not false then @schema@.wh_next_due_inbox() end,
                 case when 'perspective_event' = any (m.runs) is not false then @schema@.wh_next_due_perspective_events() end,
                 case when 'receptor' = any (m.runs) is not false then @schema@.wh_next_due_receptor_work() end)
    from (select (select i.categories from @schema@.wh_service_instances i where i.instance_id = p_instance_id)) m (runs)
$wh$;
