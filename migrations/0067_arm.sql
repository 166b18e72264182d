-- Arming: how a consumer falls asleep behind its doorbell.
--
-- The rule: the arm lock is a session's, so only a session that leads to the server itself may take it; in a pooler it would stay with
-- whoever gets that session next, and its owner would be rung for ever, or never. Waits are short: a statement that waits keeps dead rows.

-- wh_arm: takes the arm lock of an instance for this session, waiting p_wait_ms at most for producers that found it free. False: one of
-- them is still at work; while this waits, later ones ring. p_full: it can take nothing, so wh_pass_ring leaves it out. A wait in vain is
-- no error, and the server's log says nothing of it. Locks count: each true wants one wh_disarm.
create function @schema@.wh_arm(p_instance_id uuid, p_wait_ms int default 0, p_full boolean default false) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp
-- Set inside, and by this given back to the caller.
set lock_timeout = 0
as $wh$
declare
    v_key constant bigint := @schema@.wh_arm_key(p_instance_id);
begin
    if p_instance_id is null or p_full is null or p_wait_ms is null or p_wait_ms < 0 then
        raise exception 'wh_arm: instance %, wait_ms %, full % cannot be armed', coalesce(p_instance_id::text, 'null'),
            coalesce(p_wait_ms::text, 'null'), coalesce(p_full::text, 'null') using errcode = '22023',
            hint = 'Give an instance, and how many milliseconds to wait, from 0.';
    end if;
    if not pg_try_advisory_lock(v_key) then
        if p_wait_ms = 0 then
            return false;
        end if;
        begin
            perform set_config('lock_timeout', p_wait_ms::text, true);
            perform pg_advisory_lock(v_key);
        exception when lock_not_available then
            return false;
        end;
    end if;
    if p_full and not @schema@.wh_set_full(p_instance_id, true) then
        perform pg_advisory_unlock(v_key);
        return false;
    end if;
    return true;
end $wh$;

-- wh_set_full: what the holder of the arm lock is woken for from now on. False: somebody was looking at it this instant, try again.
create function @schema@.wh_set_full(p_instance_id uuid, p_full boolean) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    if p_full then
        return pg_try_advisory_lock(@schema@.wh_full_key(p_instance_id));
    end if;
    return pg_advisory_unlock(@schema@.wh_full_key(p_instance_id));
end $wh$;

-- wh_disarm: gives the arm lock back, and with p_full what wh_arm or wh_set_full noted. For the session that holds them.
create function @schema@.wh_disarm(p_instance_id uuid, p_full boolean default false) returns void
language plpgsql set search_path = pg_catalog, @schema@, pg_temp as $wh$
begin
    perform pg_advisory_unlock(@schema@.wh_arm_key(p_instance_id));
    if p_full then
        perform pg_advisory_unlock(@schema@.wh_full_key(p_instance_id));
    end if;
end $wh$;
