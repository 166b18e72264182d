-- Settling: every write about a claim matches (work id, instance, epoch) and an unfinished row, so a zombie can change nothing.
-- Rows are taken in key order inside a table and tables in the fixed order of categories, so settlements never deadlock each other.

-- The pause after an attempt: base × 2^(attempts − 1), capped. The exponent is clamped before the power, so no attempt overflows.
create function @schema@.wh_retry_delay(p_attempts bigint, p_base_seconds int default 30, p_max_seconds int default 300) returns interval
language sql immutable parallel safe
return make_interval(secs => least(p_base_seconds * 2 ^ least(greatest(p_attempts, 1) - 1, 10), p_max_seconds));

do $wh_make$
declare
    c_template constant text := $wh_template$

-- Settles rows of one category and returns the ids that no longer belong to the claim. p_verdicts null: all complete.
create function @schema@.wh_settle_{x}(
    p_instance_id uuid, p_ids uuid[], p_epochs bigint[], p_verdicts text[], p_after_milliseconds bigint[], p_reasons int[],
    p_errors text[], p_keep_completed boolean
) returns setof uuid
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan
as $wh$
declare
    v_done  uuid[] := '{}';
    v_part  uuid[];
begin
    if p_verdicts is not null then
        -- Each verdict is a statement of its own, so all rows are locked first, in key order: two calls that name the same rows under
        -- different verdicts would deadlock. The rows that a retry hands back belong to them.
        perform from (
            select i.id from unnest(p_ids) as i (id)
            union
            select b.{key}
            from unnest(p_ids, p_epochs, p_verdicts) as i (id, epoch, verdict)
            cross join lateral (select t.stream_id, {lane(t)} as lane, t.seq from {t} t
                                where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null) f
            cross join lateral (select l.{key} from {t} l
                                where {eq(l,f)} and l.{done} is null and l.instance_id is not null and l.instance_id = p_instance_id
                                  and l.seq > f.seq) b
            where i.verdict = 'retry'
            order by 1 offset 0) w
        cross join lateral (select from {t} t where t.{key} = w.id and t.instance_id = p_instance_id and t.{done} is null for update) l;
    end if;

    if p_keep_completed then
        with item as (
            select i.id, i.epoch from unnest(p_ids, p_epochs, p_verdicts) as i (id, epoch, verdict)
            where coalesce(i.verdict, 'complete') = 'complete' order by i.id offset 0
        ), kept as (
            update {t} t set {done} = clock_timestamp(), instance_id = null, lease_expiry = null
            from item i
            where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
            returning t.{key}
        )
        select coalesce(array_agg({key}), '{}') into v_done from kept;
    else
        with item as (
            select i.id, i.epoch from unnest(p_ids, p_epochs, p_verdicts) as i (id, epoch, verdict)
            where coalesce(i.verdict, 'complete') = 'complete' order by i.id offset 0
        ), gone as (
            delete from {t} t using item i
            where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
            returning t.{key}
        )
        select coalesce(array_agg({key}), '{}') into v_done from gone;
    end if;

    if p_verdicts is not null then
        -- Failed: due again after the pause. What was leased behind it goes back with its attempt refunded, in the same statement's
        -- transaction, so nobody runs a later row of the stream before this one.
        with item as (
            select i.id, i.epoch, i.after, i.reason, i.error
            from unnest(p_ids, p_epochs, p_verdicts, p_after_milliseconds, p_reasons, p_errors) as i (id, epoch, verdict, after, reason, error)
            where i.verdict = 'retry' order by i.id offset 0
        ), failed as (
            update {t} t
            set instance_id = null, lease_expiry = null, failure_reason = coalesce(i.reason, 99), error = i.error,
                scheduled_for = clock_timestamp() + coalesce(make_interval(secs => i.after / 1000.0),
                                                             @schema@.wh_retry_delay(t.attempts) * (0.9 + 0.2 * random()))
            from item i
            where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
            returning t.{key}, t.stream_id, {lane(t)} as lane, t.seq
        ), behind as (
            select b.{key} from failed cross join lateral (
                select l.{key} from {t} l
                where {eq(l,failed)} and l.{done} is null and l.instance_id is not null and l.instance_id = p_instance_id
                  and l.seq > failed.seq
                order by {ord(l)}, l.seq for update) b
        ), handed_back as (
            update {t} t set instance_id = null, lease_expiry = null, attempts = greatest(t.attempts - 1, 0)
            where t.{key} = any (array(select {key} from behind))
            returning t.{key}
        )
        select coalesce(array_agg({key}), '{}') into v_part from (select {key} from failed union all select {key} from handed_back) f;
        v_done := v_done || v_part;

        with item as (
            select i.id, i.epoch from unnest(p_ids, p_epochs, p_verdicts) as i (id, epoch, verdict)
            where i.verdict = 'release' order by i.id offset 0
        ), released as (
            update {t} t set instance_id = null, lease_expiry = null, attempts = greatest(t.attempts - 1, 0)
            from item i
            where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
            returning t.{key}
        )
        select coalesce(array_agg({key}), '{}') into v_part from released;
        v_done := v_done || v_part;

        -- Given up: the whole row moves, so that a replay loses nothing.
        with item as (
            select i.id, i.epoch, i.reason, i.error
            from unnest(p_ids, p_epochs, p_verdicts, p_reasons, p_errors) as i (id, epoch, verdict, reason, error)
            where i.verdict = 'dead_letter' order by i.id offset 0
        ), gone as (
            delete from {t} t using item i
            where t.{key} = i.id and t.instance_id = p_instance_id and t.claim_epoch = i.epoch and t.{done} is null
            returning t.{key}, t.stream_id, {name} as name, {type} as message_type, to_jsonb(t) as snapshot,
                      coalesce(i.reason, 99) as reason, coalesce(i.error, t.error) as error, t.attempts, t.crash_count
        ), letters as (
            insert into @schema@.wh_dead_letters (category, work_id, stream_id, name, message_type, row_snapshot, failure_reason, error,
                                                  attempts, crash_count, dead_lettered_by)
            select '{category}', {key}, stream_id, name, message_type, snapshot, reason, error, attempts, crash_count, p_instance_id
            from gone
            returning work_id
        )
        select coalesce(array_agg(work_id), '{}') into v_part from letters;
        v_done := v_done || v_part;
    end if;

    if p_verdicts is not null or cardinality(v_done) < cardinality(p_ids) then
        return query select i.id from unnest(p_ids) as i (id) where i.id <> all (v_done);
    end if;
end $wh$;
$wh_template$;
    v_kind record;
    v_sql  text;
begin
    for v_kind in values
        ('outbox', 'outbox', 'wh_outbox', 'message_id', 'processed_at', null, 't.destination', 't.message_type'),
        ('inbox', 'inbox', 'wh_inbox', 'message_id', 'processed_at', null, 't.handler_name', 't.message_type'),
        ('perspective_events', 'perspective_event', 'wh_perspective_events', 'event_work_id', 'processed_at', 'perspective_name',
         't.perspective_name', 'null::text'),
        ('receptor_work', 'receptor', 'wh_receptor_processing', 'id', 'completed_at', 'receptor_name', 't.receptor_name', 'null::text')
    loop
        v_sql := c_template;
        if v_kind.column6 is null then
            v_sql := regexp_replace(v_sql, '\{lane\((\w+)\)\}', '''''::text', 'g');
            v_sql := regexp_replace(v_sql, '\{ord\((\w+)\)\}', '\1.stream_id', 'g');
            v_sql := regexp_replace(v_sql, '\{eq\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id', 'g');
        else
            v_sql := regexp_replace(v_sql, '\{lane\((\w+)\)\}', '\1.' || v_kind.column6, 'g');
            v_sql := regexp_replace(v_sql, '\{ord\((\w+)\)\}', '\1.stream_id, \1.' || v_kind.column6, 'g');
            v_sql := regexp_replace(v_sql, '\{eq\((\w+),(\w+)\)\}', '\1.stream_id = \2.stream_id and \1.' || v_kind.column6 || ' = \2.lane', 'g');
        end if;
        v_sql := replace(v_sql, '{x}', v_kind.column1);
        v_sql := replace(v_sql, '{category}', v_kind.column2);
        v_sql := replace(v_sql, '{t}', '{schema}.' || v_kind.column3);
        v_sql := replace(v_sql, '{key}', v_kind.column4);
        v_sql := replace(v_sql, '{done}', v_kind.column5);
        v_sql := replace(v_sql, '{name}', v_kind.column7);
        v_sql := replace(v_sql, '{type}', v_kind.column8);
        v_sql := replace(v_sql, '{schema}', quote_ident(@schema_text@));
        execute v_sql;
    end loop;
end $wh_make$;

-- Settles a whole flush in one transaction. Element i of every array is about the same row; p_verdicts holds complete, retry, release or
-- dead_letter, and null in its place means that all are complete. Returns the rows that no longer belong to the claim: nothing was
-- changed about them.
create function @schema@.settle_work(
    p_instance_id uuid, p_categories text[], p_ids uuid[], p_epochs bigint[], p_verdicts text[] default null,
    p_after_milliseconds bigint[] default null, p_reasons int[] default null, p_errors text[] default null,
    p_keep_completed boolean default false
) returns table (category text, work_id uuid)
language plpgsql volatile set search_path = pg_catalog, @schema@, pg_temp as $wh$
#variable_conflict use_column
declare
    v_category text;
    v_bad      text;
    v_ids      uuid[];
    v_epochs   bigint[];
    v_verdicts text[];
    v_after    bigint[];
    v_reasons  int[];
    v_errors   text[];
begin
    select c into v_bad from unnest(p_categories) c where c is null or c not in ('outbox', 'inbox', 'perspective_event', 'receptor') limit 1;
    if found then
        raise exception 'unknown category %', coalesce(quote_literal(v_bad), 'null') using errcode = 'WH002',
            hint = 'Known categories: outbox, inbox, perspective_event, receptor.';
    end if;
    select v into v_bad from unnest(p_verdicts) v where v is null or v not in ('complete', 'retry', 'release', 'dead_letter') limit 1;
    if found then
        raise exception 'unknown verdict %', coalesce(quote_literal(v_bad), 'null') using errcode = '22023',
            hint = 'Known verdicts: complete, retry, release, dead_letter.';
    end if;
    if p_ids is null or cardinality(p_categories) is distinct from cardinality(p_ids) or cardinality(p_epochs) is distinct from cardinality(p_ids)
       or cardinality(p_verdicts) <> cardinality(p_ids) or cardinality(p_after_milliseconds) <> cardinality(p_ids)
       or cardinality(p_reasons) <> cardinality(p_ids) or cardinality(p_errors) <> cardinality(p_ids) then
        raise exception 'settle_work: % categories, % ids, % epochs, % verdicts, % pauses, % reasons, % errors', cardinality(p_categories),
            cardinality(p_ids), cardinality(p_epochs), cardinality(p_verdicts), cardinality(p_after_milliseconds), cardinality(p_reasons),
            cardinality(p_errors) using errcode = '22023', hint = 'All arrays must have the same length.';
    end if;
    if exists (select from @schema@.wh_instance_evictions e where e.instance_id = p_instance_id) then
        raise exception 'instance % was evicted', p_instance_id using errcode = 'WH001',
            hint = 'Discard the results: others have these rows now.';
    end if;

    for v_category in select distinct on (array_position(array['outbox', 'inbox', 'perspective_event', 'receptor'], c)) c
                      from unnest(p_categories) c
                      order by array_position(array['outbox', 'inbox', 'perspective_event', 'receptor'], c) loop
        if p_categories = array_fill(v_category, array[cardinality(p_categories)]) then
            v_ids := p_ids; v_epochs := p_epochs; v_verdicts := p_verdicts; v_after := p_after_milliseconds;
            v_reasons := p_reasons; v_errors := p_errors;
        else
            select array_agg(i.id order by i.n), array_agg(i.epoch order by i.n),
                   case when p_verdicts is not null then array_agg(i.verdict order by i.n) end,
                   array_agg(i.after order by i.n), array_agg(i.reason order by i.n), array_agg(i.error order by i.n)
            into v_ids, v_epochs, v_verdicts, v_after, v_reasons, v_errors
            from unnest(p_categories, p_ids, p_epochs, p_verdicts, p_after_milliseconds, p_reasons, p_errors)
                 with ordinality as i (cat, id, epoch, verdict, after, reason, error, n)
            where i.cat = v_category;
        end if;
        if v_category = 'outbox' then
            return query select v_category, f from @schema@.wh_settle_outbox(
                p_instance_id, v_ids, v_epochs, v_verdicts, v_after, v_reasons, v_errors, p_keep_completed) f;
        elsif v_category = 'inbox' then
            return query select v_category, f from @schema@.wh_settle_inbox(
                p_instance_id, v_ids, v_epochs, v_verdicts, v_after, v_reasons, v_errors, p_keep_completed) f;
        elsif v_category = 'perspective_event' then
            return query select v_category, f from @schema@.wh_settle_perspective_events(
                p_instance_id, v_ids, v_epochs, v_verdicts, v_after, v_reasons, v_errors, p_keep_completed) f;
        else
            return query select v_category, f from @schema@.wh_settle_receptor_work(
                p_instance_id, v_ids, v_epochs, v_verdicts, v_after, v_reasons, v_errors, p_keep_completed) f;
        end if;
    end loop;
end $wh$;

-- The same for one verdict, for operators. Each returns the ids that no longer belong to the claim, and rings whoever sleeps: what is freed
-- here, or stood behind it, is no news to a pump that did not do it.
create function @schema@.complete_work(p_category text, p_instance_id uuid, p_ids uuid[], p_epochs bigint[]) returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform @schema@.wh_ring_armed(p_category);
    return query select work_id from @schema@.settle_work(p_instance_id, array_fill(p_category, array[coalesce(cardinality(p_ids), 0)]), p_ids, p_epochs);
end $wh$;
create function @schema@.fail_work(
    p_category text, p_instance_id uuid, p_ids uuid[], p_epochs bigint[], p_error text, p_reason int default 99, p_after interval default null
) returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform @schema@.wh_ring_armed(p_category);
    return query select work_id from @schema@.settle_work(
        p_instance_id, array_fill(p_category, array[coalesce(cardinality(p_ids), 0)]), p_ids, p_epochs, array_fill('retry'::text, array[coalesce(cardinality(p_ids), 0)]),
        array_fill((extract(epoch from p_after) * 1000)::bigint, array[coalesce(cardinality(p_ids), 0)]),
        array_fill(p_reason, array[coalesce(cardinality(p_ids), 0)]), array_fill(p_error, array[coalesce(cardinality(p_ids), 0)]));
end $wh$;
create function @schema@.release_work(p_category text, p_instance_id uuid, p_ids uuid[], p_epochs bigint[]) returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform @schema@.wh_ring_armed(p_category);
    return query select work_id from @schema@.settle_work(p_instance_id, array_fill(p_category, array[coalesce(cardinality(p_ids), 0)]), p_ids, p_epochs,
                                             array_fill('release'::text, array[coalesce(cardinality(p_ids), 0)]));
end $wh$;
create function @schema@.dead_letter_work(
    p_category text, p_instance_id uuid, p_ids uuid[], p_epochs bigint[], p_error text, p_reason int default 99
) returns setof uuid
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform @schema@.wh_ring_armed(p_category);
    return query select work_id from @schema@.settle_work(
        p_instance_id, array_fill(p_category, array[coalesce(cardinality(p_ids), 0)]), p_ids, p_epochs,
        array_fill('dead_letter'::text, array[coalesce(cardinality(p_ids), 0)]), null,
        array_fill(p_reason, array[coalesce(cardinality(p_ids), 0)]), array_fill(p_error, array[coalesce(cardinality(p_ids), 0)]));
end $wh$;
