-- Storing work: what producers call, in any language.
--
-- The rule: an array of objects goes in, one row per object comes out, in the same order; a message stored before is an answer, not an
-- error. A field that is unknown, missing or of the wrong type is an error that names it and its place: a typing mistake must not
-- become a row that nobody can handle. Everything is one pass over the set; a refused array leaves nothing behind.

-- wh_check_stored: says what is wrong with the first wrong object of an array: runs only after the fast path found that something is.
-- p_fields describes the fields: {"name": "uuid" | "text" | "time" | "json"}; a name in p_required must be there and not null (a JSON
-- null is a value for "json" only).
create function @schema@.wh_check_stored(p_function text, p_messages jsonb, p_fields jsonb, p_required text[]) returns void
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
declare
    v_item record;
    v_field record;
    v_type text;
    v_value jsonb;
    v_place text;
    v_name text;
begin
    if p_messages is null or jsonb_typeof(p_messages) <> 'array' then
        raise exception using errcode = '22023',
            message = format('%s: the argument is %s, not an array', p_function, coalesce('a JSON ' || jsonb_typeof(p_messages), 'null')),
            hint = 'pass a JSON array of objects, also for a single one';
    end if;
    for v_item in select e.value as item, e.ordinality - 1 as pos from jsonb_array_elements(p_messages) with ordinality e loop
        v_place := format('%s: item %s', p_function, v_item.pos);
        if jsonb_typeof(v_item.item) <> 'object' then
            raise exception using errcode = '22023',
                message = format('%s is a JSON %s, not an object: %s', v_place, jsonb_typeof(v_item.item), left(v_item.item::text, 100)),
                hint = 'items count from 0; each is an object with the fields ' || (select string_agg(k, ', ') from jsonb_object_keys(p_fields) k);
        end if;
        for v_field in select k.key, k.value from jsonb_each(v_item.item) k order by k.key loop
            v_type := p_fields ->> v_field.key;
            if v_type is null then
                raise exception using errcode = '22023', message = format('%s has the unknown field "%s"', v_place, v_field.key),
                    hint = 'items count from 0; known fields are ' || (select string_agg(k, ', ') from jsonb_object_keys(p_fields) k);
            end if;
            v_value := v_field.value;
            continue when v_type = 'json' or jsonb_typeof(v_value) = 'null';
            begin
                if jsonb_typeof(v_value) <> 'string' then
                    raise exception using errcode = '22023', message = 'not a string';
                elsif v_type = 'uuid' then
                    if (v_value #>> '{}')::uuid = '00000000-0000-0000-0000-000000000000' then
                        raise exception using errcode = '22023', message = 'the all-zero uuid names nothing';
                    end if;
                elsif v_type = 'time' then
                    perform (v_value #>> '{}')::timestamptz;
                elsif (v_value #>> '{}') = '' and v_field.key = any (p_required) then
                    raise exception using errcode = '22023', message = 'empty';
                end if;
            exception
                when data_exception then
                    raise exception using errcode = '22023',
                        message = format('%s, field "%s": %s is not a %s: %s', v_place, v_field.key, left(v_value::text, 100),
                            case v_type when 'uuid' then 'uuid' when 'time' then 'point in time' else 'usable text' end, sqlerrm),
                        hint = 'items count from 0; pass ' || case v_type when 'uuid' then 'a string like "0192f0c1-7c1d-7e55-b3a4-6a1d6a5e0c11", never all zeros'
                            when 'time' then 'a string like "2026-01-31T12:00:00Z"' else 'a non-empty string' end;
            end;
        end loop;
        foreach v_name in array p_required loop
            if v_item.item -> v_name is null or (p_fields ->> v_name <> 'json' and jsonb_typeof(v_item.item -> v_name) = 'null') then
                raise exception using errcode = '22023', message = format('%s lacks the field "%s"', v_place, v_name),
                    hint = 'items count from 0; required fields are ' || array_to_string(p_required, ', ');
            end if;
        end loop;
    end loop;
end $wh$;

-- The four store functions share one shape. First a read-only pass that only asks whether every item is well-formed, and collects the
-- ids; its casts may fail, hence the exception block, which costs no transaction id as long as nothing is written in it. Whatever it
-- finds, wh_check_stored names. Then one statement: each row takes its `seq` by its place in the array, so that a stream keeps the array's
-- order, and goes in by the order of what makes it unique. In the array's order two producers that store the same messages the other way
-- round would wait for each other's keys, and one would die of the deadlock. Over several calls of one transaction that order is the
-- caller's. An id that comes twice in one array is new once. Usually all are new, and the answer needs no join.

-- store_outbox_messages, store_inbox_messages: returns (message_id, is_new) per item. The inbox asks wh_message_deduplication first, in
-- id order, so that two deliveries of the same batch cannot deadlock: only a first sighting is stored, long after the row itself is gone.
do $wh$
declare
    v_template constant text := $wh_template$
create function @ns@.store_@kind@_messages(p_messages jsonb) returns table (message_id uuid, is_new boolean)
language plpgsql set search_path = pg_catalog, @ns@, pg_temp as $wh_body$
#variable_conflict use_column
declare
    v_wrong boolean := true;
    v_ids uuid[];
    v_seen uuid[];
    v_new uuid[];
begin
    if jsonb_typeof(p_messages) = 'array' then
        begin
            select bool_or(jsonb_typeof(e) <> 'object'
                    or not e ?& array['message_type', 'payload']
                    or (e - array['message_id', '@name@', 'message_type', 'payload', 'metadata', 'stream_id', 'scheduled_for']) <> '{}'
                    or jsonb_typeof(e -> 'message_type') <> 'string' or (e ->> 'message_type') = ''
                    or jsonb_typeof(e -> '@name@') not in ('string', 'null')
                    or jsonb_typeof(e -> 'message_id') not in ('string', 'null')
                    or jsonb_typeof(e -> 'stream_id') not in ('string', 'null')
                    or jsonb_typeof(e -> 'scheduled_for') not in ('string', 'null')
                    or (e ->> 'message_id')::uuid = '00000000-0000-0000-0000-000000000000'
                    or (e ->> 'stream_id')::uuid = '00000000-0000-0000-0000-000000000000'
                    or (e ->> 'scheduled_for')::timestamptz < '-infinity'), -- never true: it is there to be cast
                array_agg(coalesce((e ->> 'message_id')::uuid, gen_random_uuid()))
            into v_wrong, v_ids
            from jsonb_array_elements(p_messages) e;
            v_wrong := coalesce(v_wrong, false);
        exception
            when data_exception then
                v_wrong := true;
        end;
    end if;
    if v_wrong then
        perform @ns@.wh_check_stored('store_@kind@_messages', p_messages,
            '{"message_id": "uuid", "@name@": "text", "message_type": "text", "payload": "json", "metadata": "json", "stream_id": "uuid", "scheduled_for": "time"}',
            array['message_type', 'payload']);
        raise exception using errcode = '22023', message = 'store_@kind@_messages: the array was refused',
            hint = 'this is a defect of workpump: two checks disagree';
    end if;@dedup@
    with stored as (
        insert into @ns@.@table@ (message_id, seq, stream_id, @name@, message_type, payload, metadata, scheduled_for)
        select g.id, g.seq, (g.v ->> 'stream_id')::uuid, g.v ->> '@name@', g.v ->> 'message_type', g.v -> 'payload',
            nullif(g.v -> 'metadata', 'null'), (g.v ->> 'scheduled_for')::timestamptz
        from (
            select m.v, m.id, nextval(@seq@) as seq
            from rows from (jsonb_array_elements(p_messages), unnest(v_ids)) with ordinality m (v, id, pos) order by m.pos
        ) g
        @where@order by g.id, g.seq
        on conflict (message_id) do nothing
        returning message_id
    )
    select array_agg(s.message_id) into v_new from stored s;
    if cardinality(v_new) = cardinality(v_ids) then
        return query select i.id, true from unnest(v_ids) i (id);
    else
        return query
        select i.id, coalesce(i.id = any (v_new), false) and row_number() over (partition by i.id order by i.pos) = 1
        from unnest(v_ids) with ordinality i (id, pos)
        order by i.pos;
    end if;
end $wh_body$$wh_template$;
    v_dedup constant text := $wh_dedup$
    with seen as (
        insert into @ns@.wh_message_deduplication (message_id) select distinct i.id from unnest(v_ids) i (id) order by i.id
        on conflict (message_id) do nothing
        returning message_id
    )
    select array_agg(s.message_id) into v_seen from seen s;$wh_dedup$;
begin
    execute replace(replace(replace(replace(replace(replace(replace(v_template,
        '@seq@', '''wh_outbox_seq_seq'''), '@kind@', 'outbox'), '@table@', 'wh_outbox'), '@name@', 'destination'),
        '@dedup@', ''), '@where@', ''), '@ns@', quote_ident(@schema_text@));
    execute replace(replace(replace(replace(replace(replace(replace(v_template,
        '@seq@', '''wh_inbox_seq_seq'''), '@kind@', 'inbox'), '@table@', 'wh_inbox'), '@name@', 'handler_name'),
        '@dedup@', v_dedup), '@where@', $wh_where$where cardinality(v_seen) = cardinality(v_ids) or g.id = any (v_seen)
        $wh_where$), '@ns@', quote_ident(@schema_text@));
end $wh$;

-- store_perspective_events, store_receptor_work: returns (work id, is_new) per item; work that exists under its natural key keeps its
-- id, which is the one returned.
do $wh$
declare
    v_template constant text := $wh_template$
create function @ns@.@function@(p_messages jsonb) returns table (@id@ uuid, is_new boolean)
language plpgsql set search_path = pg_catalog, @ns@, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $wh_body$
#variable_conflict use_column
declare
    v_wrong boolean := true;
    v_ids uuid[];
    v_new uuid[];
begin
    if jsonb_typeof(p_messages) = 'array' then
        begin
            select bool_or(jsonb_typeof(e) <> 'object'
                    or (e - array['@id@', 'stream_id', '@name@', 'event_id', 'scheduled_for']) <> '{}'
                    or jsonb_typeof(e -> '@name@') is distinct from 'string' or (e ->> '@name@') = ''
                    or jsonb_typeof(e -> 'event_id') is distinct from 'string'
                    or @stream_check@
                    or jsonb_typeof(e -> '@id@') not in ('string', 'null')
                    or jsonb_typeof(e -> 'scheduled_for') not in ('string', 'null')
                    or (e ->> '@id@')::uuid = '00000000-0000-0000-0000-000000000000'
                    or (e ->> 'event_id')::uuid = '00000000-0000-0000-0000-000000000000'
                    or (e ->> 'stream_id')::uuid = '00000000-0000-0000-0000-000000000000'
                    or (e ->> 'scheduled_for')::timestamptz < '-infinity'), -- never true: it is there to be cast
                array_agg(coalesce((e ->> '@id@')::uuid, gen_random_uuid()))
            into v_wrong, v_ids
            from jsonb_array_elements(p_messages) e;
            v_wrong := coalesce(v_wrong, false);
        exception
            when data_exception then
                v_wrong := true;
        end;
    end if;
    if v_wrong then
        perform @ns@.wh_check_stored('@function@', p_messages,
            '{"@id@": "uuid", "stream_id": "uuid", "@name@": "text", "event_id": "uuid", "scheduled_for": "time"}', @required@);
        raise exception using errcode = '22023', message = '@function@: the array was refused',
            hint = 'this is a defect of workpump: two checks disagree';
    end if;
    with stored as (
        insert into @ns@.@table@ (@id@, seq, stream_id, @name@, event_id, scheduled_for)
        select g.id, g.seq, g.stream_id, g.name, g.event_id, (g.v ->> 'scheduled_for')::timestamptz
        from (
            select m.v, m.id, (m.v ->> 'stream_id')::uuid as stream_id, m.v ->> '@name@' as name, (m.v ->> 'event_id')::uuid as event_id,
                nextval(@seq@) as seq
            from rows from (jsonb_array_elements(p_messages), unnest(v_ids)) with ordinality m (v, id, pos) order by m.pos
        ) g
        order by @order@, g.seq
        on conflict (@arbiter@) do nothing
        returning @id@
    )
    select array_agg(s.@id@) into v_new from stored s;
    if cardinality(v_new) = cardinality(v_ids) then
        return query select i.id, true from unnest(v_ids) i (id);
        return;
    end if;
    return query
    select coalesce(w.@id@, g.id), coalesce(w.@id@ = g.id and g.id = any (v_new), false)
        and row_number() over (partition by coalesce(w.@id@, g.id) order by g.pos) = 1
    from rows from (jsonb_array_elements(p_messages), unnest(v_ids)) with ordinality g (v, id, pos)
    left join @ns@.@table@ w on @natural_key@
    order by g.pos;
end $wh_body$$wh_template$;
    v_row record;
begin
    for v_row in
        select * from (values
            ('store_perspective_events', 'wh_perspective_events', 'event_work_id', 'perspective_name',
                $wh_check$jsonb_typeof(e -> 'stream_id') is distinct from 'string'$wh_check$,
                $wh_required$array['stream_id', 'perspective_name', 'event_id']$wh_required$,
                $wh_key$w.stream_id = (g.v ->> 'stream_id')::uuid and w.perspective_name = g.v ->> 'perspective_name'
        and w.event_id = (g.v ->> 'event_id')::uuid$wh_key$, 'stream_id, perspective_name, event_id', 'g.stream_id, g.name, g.event_id'),
            ('store_receptor_work', 'wh_receptor_processing', 'id', 'receptor_name',
                $wh_check$jsonb_typeof(e -> 'stream_id') not in ('string', 'null')$wh_check$,
                $wh_required$array['event_id', 'receptor_name']$wh_required$,
                $wh_key$w.event_id = (g.v ->> 'event_id')::uuid and w.receptor_name = g.v ->> 'receptor_name'$wh_key$, 'event_id, receptor_name', 'g.event_id, g.name')
        ) as t (function, tab, id, name, stream_check, required, natural_key, arbiter, place)
    loop
        execute replace(replace(replace(replace(replace(replace(replace(replace(replace(replace(replace(v_template,
            '@seq@', quote_literal(v_row.tab || '_seq_seq')), '@order@', v_row.place), '@arbiter@', v_row.arbiter), '@natural_key@', v_row.natural_key), '@required@', v_row.required), '@stream_check@', v_row.stream_check),
            '@function@', v_row.function), '@table@', v_row.tab), '@id@', v_row.id), '@name@', v_row.name),
            '@ns@', quote_ident(@schema_text@));
    end loop;
end $wh$;
