-- Jobs that wait for long stand here with their request, so that their Kafka records are no longer needed; and
-- cancellations, those of jobs that nobody has seen yet among them.
create table loraq.parked_jobs (
    tenant text not null,
    job_id uuid not null,
    accepted_on date not null,
    pool text not null,
    lane text not null check (lane in ('interactive', 'standard', 'batch')),
    reason text not null check (reason in ('adapter', 'retry', 'lease')),
    adapter_digest text,
    cold_since timestamptz,
    alone boolean not null default false,
    due_at timestamptz not null,
    parked_at timestamptz not null default clock_timestamp(),
    topic text not null,
    partition_number integer not null,
    record_offset bigint not null,
    record_timestamp_ms bigint not null,
    record_key bytea,
    request bytea not null,
    traceparent text,
    primary key (tenant, job_id)
);
create index parked_jobs_due on loraq.parked_jobs (pool, lane, due_at);
create index parked_jobs_by_adapter on loraq.parked_jobs (adapter_digest) where reason = 'adapter';

create table loraq.cancellations (
    tenant text not null references loraq.tenants,
    job_id uuid not null,
    requested_at timestamptz not null default clock_timestamp(),
    primary key (tenant, job_id)
);
create index cancellations_by_age on loraq.cancellations (requested_at);

-- Asks for a job to be cancelled and returns the state that it was found in. A terminal state is left as it is;
-- `unseen` means that no worker knows the job yet: it is cancelled when it arrives. Whoever has the job ends it, under
-- its fence, so a completion that comes first wins.
create function loraq.cancel_job(tenant_name text, id uuid) returns text language plpgsql as $$
declare
    found_state text;
begin
    if not exists (select from loraq.tenants where tenant = tenant_name) then
        raise exception 'no tenant "%" is registered', tenant_name using errcode = 'foreign_key_violation';
    end if;
    insert into loraq.cancellations (tenant, job_id) values (tenant_name, id) on conflict do nothing;
    select jobs.state into found_state
    from loraq.job_keys join loraq.jobs using (accepted_on, tenant, job_id)
    where job_keys.tenant = tenant_name and job_keys.job_id = id;
    if found_state in ('succeeded', 'failed', 'cancelled', 'expired') then
        delete from loraq.cancellations where tenant = tenant_name and job_id = id;
        return found_state;
    end if;
    update loraq.parked_jobs set due_at = clock_timestamp() where tenant = tenant_name and job_id = id;
    perform pg_notify('loraq_control', '');
    return coalesce(found_state, 'unseen');
end $$;

comment on table loraq.parked_jobs is 'Private. Requests of jobs that wait for long, until their job is terminal.';
comment on column loraq.parked_jobs.due_at is 'When a worker may look at the job again; pushed on while a lease is live.';
comment on table loraq.cancellations is 'Private. Cancellations by job, kept for LORAQ_CANCELLATION_RETENTION_DAYS.';
comment on function loraq.cancel_job is 'Cancels a job, or remembers to; returns the state that it was found in, or unseen.';
comment on column loraq.jobs.attempts is 'Attempts charged to the job: handings to an engine, save those that ended with others in it.';
