-- The registry, jobs, results, usage and the outbox. Times are timestamptz on the database's clock.
create schema if not exists loraq;

create table loraq.tenants (
    tenant text primary key,
    webhook_secret bytea not null,
    producer_key bytea not null,
    created_at timestamptz not null default now(),
    disabled_at timestamptz
);

create table loraq.webhook_endpoints (
    tenant text not null references loraq.tenants,
    name text not null,
    url text not null,
    created_at timestamptz not null default now(),
    disabled_at timestamptz,
    primary key (tenant, name)
);

create table loraq.adapters (
    tenant text not null references loraq.tenants,
    name text not null,
    version integer not null check (version > 0),
    status text not null check (status in ('pending', 'ready', 'rejected', 'disabled')),
    status_reason text,
    base_model text,
    base_fingerprint text,
    rank integer,
    target_modules text[] not null default '{}',
    uri text not null,
    digest text not null,
    size_bytes bigint not null,
    score double precision,
    pinned boolean not null default false,
    created_at timestamptz not null default now(),
    primary key (tenant, name, version)
);
create index adapters_pending on loraq.adapters (created_at) where status = 'pending';

create table loraq.job_keys (
    tenant text not null,
    job_id uuid not null,
    accepted_on date not null,
    fingerprint bytea not null,
    primary key (tenant, job_id)
);
create index job_keys_by_day on loraq.job_keys (accepted_on);

create table loraq.jobs (
    tenant text not null,
    job_id uuid not null,
    pool text not null,
    adapter text,
    adapter_version integer,
    lane text not null check (lane in ('interactive', 'standard', 'batch')),
    state text not null check (state in ('queued', 'running', 'parked', 'succeeded', 'failed', 'cancelled', 'expired')),
    error_code text,
    error_message text,
    attempts integer not null default 0,
    accepted_on date not null,
    accepted_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz,
    worker text,
    replay_of uuid,
    metadata jsonb not null default '{}',
    fence bigint not null default 0,
    lease_until timestamptz,
    primary key (accepted_on, tenant, job_id)
) partition by range (accepted_on);
create index jobs_by_tenant on loraq.jobs (tenant, accepted_at desc);
create index jobs_unfinished on loraq.jobs (pool, state) where state in ('queued', 'running', 'parked');

create table loraq.results (
    tenant text not null,
    job_id uuid not null,
    accepted_on date not null,
    output_text text,
    output_url text,
    output_token_ids integer[] not null,
    logprobs jsonb,
    finish_reason text not null check (finish_reason in ('stop', 'length')),
    prompt_tokens integer not null,
    cached_tokens integer not null,
    completion_tokens integer not null,
    queue_ms double precision not null,
    load_ms double precision not null,
    first_token_ms double precision,
    total_ms double precision not null,
    primary key (accepted_on, tenant, job_id)
) partition by range (accepted_on);

create table loraq.jobs_default partition of loraq.jobs default;
create table loraq.results_default partition of loraq.results default;

-- One partition a day, made ahead of time; the default partitions catch a clock that runs away from the maintenance.
create function loraq.ensure_partitions(days_ahead integer) returns void language plpgsql as $$
declare
    day date;
    parent text;
begin
    for offset_days in 0..days_ahead loop
        day := current_date + offset_days;
        foreach parent in array array['jobs', 'results'] loop
            if to_regclass(format('loraq.%I', parent || '_' || to_char(day, 'YYYYMMDD'))) is null then
                begin
                    execute format('create table if not exists loraq.%I partition of loraq.%I for values from (%L) to (%L)',
                                   parent || '_' || to_char(day, 'YYYYMMDD'), parent, day, day + 1);
                exception when check_violation then
                    raise warning 'rows of % are in the default partition of % already and stay there', day, parent;
                end;
            end if;
        end loop;
    end loop;
end $$;
select loraq.ensure_partitions(7);

create table loraq.usage_hourly (
    tenant text not null,
    adapter text not null,
    adapter_version integer not null,
    hour timestamptz not null,
    jobs bigint not null default 0,
    prompt_tokens bigint not null default 0,
    cached_tokens bigint not null default 0,
    completion_tokens bigint not null default 0,
    wasted_tokens bigint not null default 0,
    primary key (tenant, adapter, adapter_version, hour)
);

-- One row per effect that must follow a committed outcome: its event on Kafka, and its webhook.
create table loraq.outbox (
    id bigint generated always as identity primary key,
    event_id uuid not null,
    kind text not null check (kind in ('event', 'webhook')),
    tenant text not null,
    job_id uuid not null,
    pool text not null,
    type text not null,
    body text not null,
    target text not null default '',
    traceparent text,
    state text not null default 'pending' check (state in ('pending', 'done', 'dead')),
    attempts integer not null default 0,
    next_attempt_at timestamptz not null default now(),
    created_at timestamptz not null default now(),
    finished_at timestamptz,
    unique (event_id, kind, target)
);
create index outbox_due on loraq.outbox (kind, next_attempt_at) where state = 'pending';
create index outbox_by_job on loraq.outbox (tenant, job_id);
create index outbox_finished on loraq.outbox (finished_at) where state <> 'pending';

create table loraq.webhook_deliveries (
    id bigint generated always as identity primary key,
    webhook_id uuid not null,
    tenant text not null,
    job_id uuid not null,
    url text not null,
    attempt integer not null,
    outcome text not null check (outcome in ('delivered', 'retrying', 'failed', 'blocked')),
    status_code integer,
    error text,
    started_at timestamptz not null,
    duration_ms double precision not null,
    next_attempt_at timestamptz
);
create index webhook_deliveries_by_job on loraq.webhook_deliveries (tenant, job_id);

comment on table loraq.jobs is 'One row per accepted job, in every state of its life. Partitioned by accepted_on.';
comment on column loraq.jobs.tenant is 'Owner of the job.';
comment on column loraq.jobs.job_id is 'Unique per tenant; as sent, or derived from where the record stands.';
comment on column loraq.jobs.pool is 'The deployment of one base model that served the job.';
comment on column loraq.jobs.adapter is 'Adapter name as asked for, without version; null for the base model.';
comment on column loraq.jobs.adapter_version is 'The version fixed when the job was first taken; null for the base model.';
comment on column loraq.jobs.lane is 'interactive, standard or batch: the topic it came from.';
comment on column loraq.jobs.state is 'queued, running, parked, succeeded, failed, cancelled or expired; the last four are terminal.';
comment on column loraq.jobs.error_code is 'Stable error code, null unless the job failed, was cancelled or expired.';
comment on column loraq.jobs.error_message is 'A sentence that names the culprit and what to do.';
comment on column loraq.jobs.attempts is 'How often the job was handed to an engine.';
comment on column loraq.jobs.accepted_on is 'Day (UTC) of acceptance by the database clock; the partition key.';
comment on column loraq.jobs.accepted_at is 'When a worker first recorded the job.';
comment on column loraq.jobs.started_at is 'When the newest attempt began.';
comment on column loraq.jobs.finished_at is 'When the job reached its terminal state.';
comment on column loraq.jobs.worker is 'The worker of the newest attempt.';
comment on column loraq.jobs.replay_of is 'The job that this one replays, if any.';
comment on column loraq.jobs.metadata is 'The metadata that came with the request, unchanged.';
comment on column loraq.jobs.fence is 'Private. Rises with every taking; a write with an older fence changes nothing.';
comment on column loraq.jobs.lease_until is 'Private. Until then the job belongs to its worker.';

comment on table loraq.results is 'One row per succeeded job, never changed. Partitioned by accepted_on.';
comment on column loraq.results.tenant is 'Owner of the job.';
comment on column loraq.results.job_id is 'The job that this result belongs to.';
comment on column loraq.results.accepted_on is 'Day (UTC) of acceptance; joins jobs partition by partition.';
comment on column loraq.results.output_text is 'The generated text; null when it was stored at output_url. U+0000 is written as U+2400.';
comment on column loraq.results.output_url is 'Where a large output lies; null otherwise.';
comment on column loraq.results.output_token_ids is 'The generated tokens, exact.';
comment on column loraq.results.logprobs is 'Per generated token a map token id to log-probability; null unless asked for.';
comment on column loraq.results.finish_reason is 'stop or length.';
comment on column loraq.results.prompt_tokens is 'Tokens of the prompt.';
comment on column loraq.results.cached_tokens is 'Tokens of the prompt that the prefix cache served.';
comment on column loraq.results.completion_tokens is 'Tokens generated.';
comment on column loraq.results.queue_ms is 'Milliseconds from acceptance to the start of the attempt, adapter loading excluded.';
comment on column loraq.results.load_ms is 'Milliseconds spent waiting for the adapter.';
comment on column loraq.results.first_token_ms is 'Milliseconds from the start of the attempt to the first token.';
comment on column loraq.results.total_ms is 'Milliseconds from acceptance to completion.';

comment on table loraq.adapters is 'Every version of every adapter, with the outcome of its admission.';
comment on column loraq.adapters.tenant is 'Owner of the adapter.';
comment on column loraq.adapters.name is 'Name, unique per tenant.';
comment on column loraq.adapters.version is 'Counts up from 1 with every push of new content under the name.';
comment on column loraq.adapters.status is 'pending, ready, rejected or disabled.';
comment on column loraq.adapters.status_reason is 'Why it is rejected or disabled, or a remark on a ready one.';
comment on column loraq.adapters.base_model is 'Base model that the adapter names in its own configuration.';
comment on column loraq.adapters.base_fingerprint is 'Fingerprint of the base model that it was admitted for.';
comment on column loraq.adapters.rank is 'Largest true rank of its tensors.';
comment on column loraq.adapters.target_modules is 'Projections that it adapts.';
comment on column loraq.adapters.uri is 's3:// prefix of its two files.';
comment on column loraq.adapters.digest is 'SHA-256 over both files, each framed by name and length: its identity everywhere.';
comment on column loraq.adapters.size_bytes is 'Bytes of both files.';
comment on column loraq.adapters.score is 'Score of the newest evaluation, if any.';
comment on column loraq.adapters.pinned is 'Kept in host memory whatever the traffic.';
comment on column loraq.adapters.created_at is 'When it was pushed.';

comment on table loraq.usage_hourly is 'Tokens of committed results per tenant, adapter and hour (by finish); adapter is empty and version 0 for the base model.';
comment on column loraq.usage_hourly.tenant is 'Owner of the jobs.';
comment on column loraq.usage_hourly.adapter is 'Adapter name; empty for the base model.';
comment on column loraq.usage_hourly.adapter_version is 'Adapter version; 0 for the base model.';
comment on column loraq.usage_hourly.hour is 'Start of the hour, UTC.';
comment on column loraq.usage_hourly.jobs is 'Succeeded jobs.';
comment on column loraq.usage_hourly.prompt_tokens is 'Prompt tokens.';
comment on column loraq.usage_hourly.cached_tokens is 'Prompt tokens that the prefix cache served.';
comment on column loraq.usage_hourly.completion_tokens is 'Generated tokens.';
comment on column loraq.usage_hourly.wasted_tokens is 'Tokens of attempts that were abandoned.';

comment on table loraq.webhook_deliveries is 'Every attempt to deliver a webhook.';
comment on column loraq.webhook_deliveries.id is 'Counts the attempts of all webhooks.';
comment on column loraq.webhook_deliveries.webhook_id is 'The webhook-id header: the same for every attempt of one event.';
comment on column loraq.webhook_deliveries.tenant is 'Owner of the job.';
comment on column loraq.webhook_deliveries.job_id is 'The job whose outcome is delivered.';
comment on column loraq.webhook_deliveries.url is 'Where it was sent.';
comment on column loraq.webhook_deliveries.attempt is 'Counts from 1 for each webhook.';
comment on column loraq.webhook_deliveries.outcome is 'delivered (2xx), retrying, failed (given up) or blocked (the address is not allowed).';
comment on column loraq.webhook_deliveries.status_code is 'HTTP status, null without an answer.';
comment on column loraq.webhook_deliveries.error is 'Why it was not delivered.';
comment on column loraq.webhook_deliveries.started_at is 'When the attempt began.';
comment on column loraq.webhook_deliveries.duration_ms is 'How long it took, in milliseconds.';
comment on column loraq.webhook_deliveries.next_attempt_at is 'When the next attempt is due; null when there is none.';
