//! The log that the database writes, and the wrappers that name the operation a change belongs to.

use tokio_postgres::Client;
use uuid::Uuid;

use crate::work::KINDS;

const TABLES: &str = "
create schema hist;
create sequence hist.n cache 1;
create table hist.log (
    n bigint not null default nextval('hist.n'), op bigint not null, started bigint, began timestamptz not null, at timestamptz not null,
    verb text not null, category text not null, id uuid not null, stream uuid, lane text not null, seq bigint not null,
    old jsonb, new jsonb);
-- Numbers given after the commit of a store: the row was visible to whatever started later.
create table hist.committed (id uuid not null, n bigint not null default nextval('hist.n'));

create function hist.note() returns trigger language plpgsql as $f$
declare
    v_row constant jsonb := to_jsonb(coalesce(new, old));
begin
    insert into hist.log (op, started, began, at, verb, category, id, stream, lane, seq, old, new)
    values (coalesce(nullif(current_setting('test.op', true), ''), '0')::bigint, nullif(current_setting('test.started', true), '')::bigint,
            statement_timestamp(), clock_timestamp(), tg_op, tg_argv[0], (v_row ->> tg_argv[1])::uuid, (v_row ->> 'stream_id')::uuid,
            coalesce(v_row ->> tg_argv[2], ''), (v_row ->> 'seq')::bigint,
            hist.lease(to_jsonb(old), tg_argv[3]), hist.lease(to_jsonb(new), tg_argv[3]));
    return null;
end $f$;
create function hist.micros(p_time text) returns bigint language sql immutable as
    'select case when p_time = ''infinity'' then 9000000000000000000 else (extract(epoch from p_time::timestamptz) * 1000000)::bigint end';
create function hist.lease(p_row jsonb, p_done text) returns jsonb language sql immutable as $f$
    select case when p_row is not null then jsonb_build_object(
        'instance', p_row -> 'instance_id', 'epoch', p_row -> 'claim_epoch', 'expiry', hist.micros(p_row ->> 'lease_expiry'),
        'attempts', p_row -> 'attempts', 'crashes', p_row -> 'crash_count', 'scheduled', hist.micros(p_row ->> 'scheduled_for'),
        'done', p_row ->> p_done is not null) end
$f$;
create function hist.yes(bigint) returns boolean language sql as 'select true';
create function hist.slowly() returns boolean language sql volatile as 'select pg_sleep(0.003) is not null';
create function hist.begin(p_op bigint) returns void language sql as $f$
    select set_config('test.op', p_op::text, true), set_config('test.started', nextval('hist.n')::text, true)
$f$;
create function hist.claim(p_op bigint, p_me uuid, p_rows int, p_seconds int, p_categories text[], p_run int)
returns setof claimed_work language plpgsql as $f$
begin
    perform hist.begin(p_op);
    return query select * from claim_work(p_me, p_rows, p_seconds, 10000, p_categories, p_run);
end $f$;
create function hist.settle(p_op bigint, p_me uuid, p_categories text[], p_ids uuid[], p_epochs bigint[], p_verdicts text[],
    p_after bigint[], p_keep boolean) returns setof uuid language plpgsql as $f$
begin
    perform hist.begin(p_op);
    return query select work_id from settle_work(p_me, p_categories, p_ids, p_epochs, p_verdicts, p_after, p_keep_completed => p_keep);
end $f$;
create function hist.renew(p_op bigint, p_category text, p_me uuid, p_ids uuid[], p_epochs bigint[], p_seconds int)
returns table (id uuid, locked boolean) language plpgsql as $f$
begin
    perform hist.begin(p_op);
    return query select work_id, lease_expiry is null from renew_claims(p_category, p_me, p_ids, p_epochs, p_seconds);
end $f$;
-- Ends the lease of one random run, all rows of it or none.
create function hist.warp(p_op bigint, p_table text, p_key text, p_lane text) returns void language plpgsql as $f$
declare
    v_row record;
    v_ids uuid[];
begin
    perform hist.begin(p_op);
    execute format('select %1$I as id, stream_id, %2$s as lane from %3$I where instance_id is not null order by random() limit 1',
        p_key, p_lane, p_table) into v_row;
    if v_row.id is null then
        return;
    end if;
    execute format('select array_agg(id) from (select %1$I as id from %3$I where instance_id is not null
        and (%1$I = $1 or stream_id = $2 and %2$s = $3) order by %1$I for update nowait) l', p_key, p_lane, p_table)
        into v_ids using v_row.id, v_row.stream_id, v_row.lane;
    -- One instant for the whole run, as for every lease.
    execute format('update %2$I set lease_expiry = $2 where %1$I = any ($1) and lease_expiry > $2', p_key, p_table)
        using v_ids, clock_timestamp();
exception when lock_not_available then
    return;
end $f$;
";

pub(crate) async fn install(client: &Client) {
    client.batch_execute(TABLES).await.expect("the log");
    for kind in KINDS {
        let sql = format!(
            "create trigger hist_note after insert or update or delete on {} for each row
             execute function hist.note('{}', '{}', '{}', '{}')",
            kind.table,
            kind.category,
            kind.key,
            kind.lane.unwrap_or("none"),
            kind.done
        );
        client.batch_execute(&sql).await.expect("the trigger of the log");
    }
}

/// The lease block of a row. Times are microseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) instance: Option<Uuid>,
    pub(crate) epoch: i64,
    pub(crate) expiry: Option<i64>,
    pub(crate) attempts: i64,
    pub(crate) crashes: i64,
    pub(crate) scheduled: Option<i64>,
    pub(crate) done: bool,
}

/// One change of one row.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) n: i64,
    pub(crate) op: i64,
    pub(crate) started: i64,
    pub(crate) began: i64,
    pub(crate) at: i64,
    pub(crate) id: Uuid,
    pub(crate) seq: i64,
    pub(crate) key: Key,
    pub(crate) old: Option<Lease>,
    pub(crate) new: Option<Lease>,
}

/// The order key: what "a stream" is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) category: String,
    pub(crate) stream: Option<Uuid>,
    pub(crate) lane: String,
}

fn lease(value: Option<serde_json::Value>) -> Option<Lease> {
    let value = value?;
    let number = |name: &str| value[name].as_i64();
    Some(Lease {
        instance: value["instance"].as_str().map(|text| text.parse().expect("an instance")),
        epoch: number("epoch").expect("an epoch"),
        expiry: number("expiry"),
        attempts: number("attempts").expect("attempts"),
        crashes: number("crashes").expect("crashes"),
        scheduled: number("scheduled"),
        done: value["done"].as_bool().expect("done or not"),
    })
}

/// Everything that is committed, in order.
pub(crate) async fn read(client: &Client) -> Vec<Event> {
    let sql = "select n, op, coalesce(started, n), hist.micros(began::text), hist.micros(at::text), id, seq, category, stream, lane, old, new
               from hist.log order by n";
    let rows = client.query(sql, &[]).await.expect("the log");
    let event = |row: &tokio_postgres::Row| Event {
        n: row.get(0),
        op: row.get(1),
        started: row.get(2),
        began: row.get(3),
        at: row.get(4),
        id: row.get(5),
        seq: row.get(6),
        key: Key { category: row.get(7), stream: row.get(8), lane: row.get(9) },
        old: lease(row.get(10)),
        new: lease(row.get(11)),
    };
    rows.iter().map(event).collect()
}

/// When the stored rows were known to be visible.
pub(crate) async fn commits(client: &Client) -> std::collections::HashMap<Uuid, i64> {
    let rows = client.query("select id, n from hist.committed", &[]).await.expect("the commits");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}
