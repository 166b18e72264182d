-- The death watch: to learn of a peer's death within milliseconds, wait for its alive-lock.
--
-- The rule: a verdict is spoken only after the lock stayed free for a grace, against a member whose last beat said it held the lock and
-- who has not beaten since. Anything else (a lost connection, a server restart, a lock retaken) is no death.

-- wh_watch_slice: waits at most 100 ms for one alive-lock, shared, so that any number of watchers can wait. The lock goes with the
-- transaction: a watcher that stalls locks nobody out. Timeouts are caught here: they are the normal case and no line in the log.
create function @schema@.wh_watch_slice(p_key bigint) returns boolean
language plpgsql set search_path = pg_catalog, @schema@, pg_temp set lock_timeout = '100ms' as $wh$
begin
    perform pg_advisory_xact_lock_shared(p_key);
    return true;
exception
    when lock_not_available then
        return false;
end $wh$;

-- wh_watch: returns (peer, since) as soon as the alive-lock of a declared holder came free, or nulls after p_wait. One statement per
-- re-arm; call it outside a transaction block. First, unless p_census is false, the suspects that nobody waits for (watcher and peer
-- died together, a single instance was killed and restarted): members that declared the lock while nobody holds it. Then the ring
-- successor: the next holder by id. Whoever was waited for before a nearer one came stays under observation until the call ends: the
-- newcomer is his watcher from now on, but its own watch begins some moments later. A COMMIT between slices: one long wait would pin xmin and slow every claim down. No `set` clause
-- here, because PostgreSQL forbids COMMIT under one; every name is qualified instead.
create procedure @schema@.wh_watch(p_me uuid, p_wait interval, out peer uuid, out since timestamptz, p_census boolean default true)
language plpgsql as $wh$
declare
    v_until constant timestamptz := pg_catalog.clock_timestamp() operator(pg_catalog.+) p_wait;
    v_peer uuid;
    v_next uuid;
    v_held boolean;
    v_former uuid[] := '{}';
begin
    if p_census then
        select m.instance_id into peer
        from @schema@.wh_service_instances m
        where m.lock_declared and m.instance_id operator(pg_catalog.<>) p_me
          and not exists (select 1 from @schema@.wh_held_keys() h
              where h.key operator(pg_catalog.=) @schema@.wh_alive_key(m.instance_id))
        order by m.instance_id operator(pg_catalog.<) p_me, m.instance_id
        limit 1;
        if peer is not null then
            since := pg_catalog.clock_timestamp();
            return;
        end if;
        commit;
    end if;
    loop
        -- Whoever was waited for and holds the lock no more died between two slices: he comes before all others.
        select m.instance_id, h.key is not null into v_next, v_held
        from @schema@.wh_service_instances m
        left join @schema@.wh_held_keys() h on h.key operator(pg_catalog.=) @schema@.wh_alive_key(m.instance_id)
        where m.lock_declared and m.instance_id operator(pg_catalog.<>) p_me
          and (h.key is not null or m.instance_id operator(pg_catalog.=) v_peer or m.instance_id operator(pg_catalog.=) any (v_former))
        order by h.key is not null, m.instance_id operator(pg_catalog.<) p_me, m.instance_id
        limit 1;
        if v_peer is not null and v_peer operator(pg_catalog.<>) v_next and v_peer operator(pg_catalog.<>) all (v_former) then
            v_former := pg_catalog.array_append(v_former, v_peer);
        end if;
        v_peer := v_next;
        if v_peer is null then
            perform pg_catalog.pg_sleep(0.1);
        elsif not v_held or @schema@.wh_watch_slice(@schema@.wh_alive_key(v_peer)) then
            peer := v_peer;
            since := pg_catalog.clock_timestamp();
            commit;
            return;
        end if;
        commit;
        exit when pg_catalog.clock_timestamp() operator(pg_catalog.>=) v_until;
    end loop;
end $wh$;

-- wh_evict_suspect: the verdict, one autocommit statement, at least the grace after p_since. `early`: not yet, or the member's row is
-- busy, ask again. `alive`: the lock is held. `beaten`: it has beaten since, or its last beat did not declare the lock, or it is gone.
-- `evicted`: T1 is done; the caller goes on with wh_release_instance. The shared lock makes "not held again" atomic with the delete:
-- the peer cannot retake the lock until this commits, and its next beat is then refused.
create function @schema@.wh_evict_suspect(p_me uuid, p_peer uuid, p_since timestamptz, p_grace_seconds double precision) returns text
language plpgsql set search_path = pg_catalog, @schema@, pg_temp set lock_timeout = '200ms' as $wh$
begin
    if p_me = p_peer then
        raise exception using errcode = '22023', message = format('instance %s cannot evict itself', p_me), hint = 'call deregister_instance to leave';
    end if;
    if clock_timestamp() < p_since + make_interval(secs => p_grace_seconds) then
        return 'early';
    end if;
    if exists (select 1 from @schema@.wh_instance_evictions t where t.instance_id = p_me) then
        raise exception using errcode = 'WH001', message = format('instance %s was evicted: its verdicts do not count', p_me),
            hint = 'start again under a fresh instance id';
    end if;
    if @schema@.wh_lock_held(p_peer) or not pg_try_advisory_xact_lock_shared(@schema@.wh_alive_key(p_peer)) then
        return 'alive';
    end if;
    delete from @schema@.wh_service_instances m
    where m.instance_id = p_peer and m.last_heartbeat_at < p_since and m.lock_declared;
    if not found then
        return 'beaten';
    end if;
    perform @schema@.wh_bury(p_peer, p_me, 'alive-lock lost');
    return 'evicted';
exception
    when lock_not_available then
        return 'early';
end $wh$;
