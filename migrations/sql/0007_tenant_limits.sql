-- Limits per tenant, the workers of each pool, and the reason for which a job waits. Every change adds something and
-- rewrites no table.

create table loraq.tenant_limits (
    tenant text primary key references loraq.tenants on delete cascade,
    weight double precision not null default 1 check (weight >= 0.01 and weight <= 1000),
    running integer check (running >= 0),
    queued integer check (queued >= 1),
    tokens_per_s double precision check (tokens_per_s > 0 and tokens_per_s < 'infinity'),
    burst double precision check (burst > 0 and burst < 'infinity'),
    over_limit text not null default 'wait' check (over_limit in ('wait', 'refuse')),
    changed_at timestamptz not null default now(),
    check (burst is null or tokens_per_s is not null)
);

-- Workers listen on this channel for cancellations already; they read the table when they are woken.
create function loraq.announce_tenant_limits() returns trigger language plpgsql as $$
begin
    perform pg_notify('loraq_control', '');
    return null;
end $$;
create trigger announce after insert or update or delete on loraq.tenant_limits
    for each statement execute function loraq.announce_tenant_limits();

comment on table loraq.tenant_limits is 'Limits by tenant, in each pool; a tenant without a row has none. Written by `loraq tenants limits`.';
comment on column loraq.tenant_limits.tenant is 'The tenant.';
comment on column loraq.tenant_limits.weight is 'Its share of a lane relative to other tenants, whose weight is 1 by default.';
comment on column loraq.tenant_limits.running is 'Most jobs that run at once in a pool; 0 runs none, null means no limit.';
comment on column loraq.tenant_limits.queued is 'Most jobs that wait in the memory of a pool''s workers; null means no limit.';
comment on column loraq.tenant_limits.tokens_per_s is 'Prompt and output tokens per second in a pool, in the long run; null means no limit.';
comment on column loraq.tenant_limits.burst is 'Tokens that may be used at once after a pause; null means 10 seconds of tokens_per_s.';
comment on column loraq.tenant_limits.over_limit is 'What happens to a job that cannot run soon: wait parks it, refuse fails it with limit_exceeded.';
comment on column loraq.tenant_limits.changed_at is 'When the limits were last changed.';

-- Heartbeats are worth nothing after a crash of the server, so they are not logged.
create unlogged table loraq.worker_status (
    pool text not null,
    worker text not null,
    started_at timestamptz not null,
    seen_at timestamptz not null,
    engine_ready boolean not null,
    running integer not null,
    waiting integer not null,
    waiting_bytes bigint not null,
    loaded_adapters integer not null,
    resident_adapters integer not null,
    tokens_per_s double precision not null,
    tenants jsonb not null default '{}',
    details jsonb not null default '{}',
    primary key (pool, worker)
) with (fillfactor = 10);
comment on table loraq.worker_status is 'Private. One row per live worker, written every second; a row that is not written for a minute is deleted.';
comment on column loraq.worker_status.tenants is 'Private. By limited tenant: jobs running and waiting, and the tokens charged since started_at.';

-- Jobs may be parked until their tenant's limit has room. Existing rows need no check: they satisfied a stricter one.
alter table loraq.parked_jobs drop constraint parked_jobs_reason_check;
alter table loraq.parked_jobs add constraint parked_jobs_reason_check
    check (reason in ('adapter', 'retry', 'lease', 'limit')) not valid;
create index parked_jobs_over_limit on loraq.parked_jobs (pool, tenant, lane, record_timestamp_ms, record_offset)
    where reason = 'limit';

alter table loraq.jobs
    add column wait_reason text,
    add column wait_since timestamptz;
comment on column loraq.jobs.wait_reason is 'Why the job waits, as of the last renewal of its lease: adapter_loading, overtaken_for_affinity, tenant_over_share, tenant_limit or engine_full; null while it does not wait.';
comment on column loraq.jobs.wait_since is 'Since when the job waits for that reason; null while it does not wait.';
