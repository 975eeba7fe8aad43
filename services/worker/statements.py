"""Every SQL statement of the worker, by name. Arrays in, one round trip each, whatever the batch's size.

Rows are touched in the order of their keys, so that two workers never wait for each other in a circle.
"""

TENANTS = """
select tenant, producer_key, disabled_at is not null as disabled
from loraq.tenants
where tenant = any($1::text[])
"""

ANY_TENANT = "select exists (select from loraq.tenants where disabled_at is null)"

CLAIM_KEYS = """
insert into loraq.job_keys (tenant, job_id, accepted_on, fingerprint)
select tenant, job_id, (now() at time zone 'UTC')::date, fingerprint
from unnest($1::text[], $2::uuid[], $3::bytea[]) as sent (tenant, job_id, fingerprint)
order by tenant, job_id
on conflict do nothing
"""

KNOWN_JOBS = """
select
    tenant, job_id, accepted_on, fingerprint, state, attempts, adapter_version,
    greatest(extract(epoch from lease_until - clock_timestamp()), 0)::float8 as lease_left_s
from unnest($1::text[], $2::uuid[]) as sent (tenant, job_id)
join loraq.job_keys using (tenant, job_id)
join loraq.jobs using (accepted_on, tenant, job_id)
order by tenant, job_id
for update of jobs
"""

INSERT_JOBS = """
with made as (
    insert into loraq.jobs
        (tenant, job_id, pool, adapter, adapter_version, lane, state, attempts, started_at, accepted_on, accepted_at,
         worker, metadata, fence, lease_until, replay_of)
    select
        tenant, job_id, $6, adapter, adapter_version, lane, case when starts then 'running' else 'queued' end,
        starts::integer, case when starts then clock_timestamp() end, (now() at time zone 'UTC')::date, now(),
        $7, metadata::jsonb, 1, clock_timestamp() + $8::interval, replay_of
    from unnest($1::text[], $2::uuid[], $3::text[], $4::integer[], $5::text[], $9::text[], $10::uuid[],
                $11::boolean[])
        as sent (tenant, job_id, adapter, adapter_version, lane, metadata, replay_of, starts)
)
select (now() at time zone 'UTC')::date as accepted_on, 1::bigint as fence, 0 as attempts, 0::float8 as age_s
"""

TAKE_JOBS = """
update loraq.jobs
set fence = jobs.fence + 1,
    state = 'queued',
    worker = $5,
    lease_until = clock_timestamp() + $6::interval,
    adapter_version = coalesce(jobs.adapter_version, sent.adapter_version)
from unnest($1::date[], $2::text[], $3::uuid[], $4::integer[]) as sent (accepted_on, tenant, job_id, adapter_version)
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
returning
    jobs.tenant, jobs.job_id, jobs.accepted_on, jobs.fence, jobs.attempts,
    extract(epoch from clock_timestamp() - jobs.accepted_at)::float8 as age_s
"""

START_JOBS = """
update loraq.jobs
set state = 'running',
    attempts = jobs.attempts + sent.charge,
    started_at = clock_timestamp(),
    worker = $6,
    lease_until = clock_timestamp() + $7::interval
from unnest($1::date[], $2::text[], $3::uuid[], $4::bigint[], $5::timestamptz[], $8::integer[])
    as sent (accepted_on, tenant, job_id, fence, deadline, charge)
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
    and jobs.fence = sent.fence and jobs.state in ('queued', 'running')
    and (sent.deadline is null or sent.deadline > clock_timestamp())
returning jobs.tenant, jobs.job_id, jobs.attempts
"""

RENEW_LEASES = """
update loraq.jobs
set lease_until = clock_timestamp() + $5::interval
from unnest($1::date[], $2::text[], $3::uuid[], $4::bigint[]) as held (accepted_on, tenant, job_id, fence)
where jobs.accepted_on = held.accepted_on and jobs.tenant = held.tenant and jobs.job_id = held.job_id
    and jobs.fence = held.fence and jobs.state in ('queued', 'running')
returning jobs.tenant, jobs.job_id
"""

RELEASE_JOBS = """
update loraq.jobs
set lease_until = null, state = 'queued', attempts = jobs.attempts - held.unspent
from unnest($1::date[], $2::text[], $3::uuid[], $4::bigint[], $5::integer[])
    as held (accepted_on, tenant, job_id, fence, unspent)
where jobs.accepted_on = held.accepted_on and jobs.tenant = held.tenant and jobs.job_id = held.job_id
    and jobs.fence = held.fence and jobs.state in ('queued', 'running')
"""

FINISH_JOBS = """
update loraq.jobs
set state = ended.state,
    error_code = ended.error_code,
    error_message = ended.error_message,
    finished_at = clock_timestamp(),
    lease_until = null
from unnest($1::date[], $2::text[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[])
    with ordinality as ended (accepted_on, tenant, job_id, fence, state, error_code, error_message, place)
where jobs.accepted_on = ended.accepted_on and jobs.tenant = ended.tenant and jobs.job_id = ended.job_id
    and jobs.fence = ended.fence and jobs.state in ('queued', 'running')
returning ended.place
"""

INSERT_RESULTS = """
insert into loraq.results
    (accepted_on, tenant, job_id, output_text, output_url, output_token_ids, logprobs, finish_reason, prompt_tokens,
     cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms)
select
    accepted_on, tenant, job_id, output_text, output_url, token_ids::integer[], logprobs::jsonb,
    finish_reason, prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms
from unnest($1::date[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
            $9::integer[], $10::integer[], $11::integer[], $12::float8[], $13::float8[], $14::float8[], $15::float8[])
    as made (accepted_on, tenant, job_id, output_text, output_url, token_ids, logprobs, finish_reason, prompt_tokens,
             cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms)
"""

ADD_USAGE = """
insert into loraq.usage_hourly
    (tenant, adapter, adapter_version, hour, jobs, prompt_tokens, cached_tokens, completion_tokens, wasted_tokens)
select tenant, adapter, adapter_version, date_trunc('hour', now(), 'UTC'), jobs, prompt_tokens, cached_tokens,
    completion_tokens, wasted_tokens
from unnest($1::text[], $2::text[], $3::integer[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[])
    as used (tenant, adapter, adapter_version, jobs, prompt_tokens, cached_tokens, completion_tokens, wasted_tokens)
order by tenant, adapter, adapter_version
on conflict (tenant, adapter, adapter_version, hour) do update
set jobs = usage_hourly.jobs + excluded.jobs,
    prompt_tokens = usage_hourly.prompt_tokens + excluded.prompt_tokens,
    cached_tokens = usage_hourly.cached_tokens + excluded.cached_tokens,
    completion_tokens = usage_hourly.completion_tokens + excluded.completion_tokens,
    wasted_tokens = usage_hourly.wasted_tokens + excluded.wasted_tokens
"""

INSERT_OUTBOX = """
insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body, target, traceparent)
select event_id, kind, tenant, job_id, $9, type, body, target, traceparent
from unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::text[], $8::text[])
    as effect (event_id, kind, tenant, job_id, type, body, target, traceparent)
"""

WAKE_DISPATCHERS = "select pg_notify('loraq_outbox', '')"

CANCEL_JOBS = """
select loraq.cancel_job(tenant, job_id)
from unnest($1::text[], $2::uuid[]) as asked (tenant, job_id)
join loraq.tenants using (tenant)
"""

CANCELLED_AMONG = """
select tenant, job_id
from unnest($1::text[], $2::uuid[]) as held (tenant, job_id)
join loraq.cancellations using (tenant, job_id)
"""

FORGET_CANCELLATIONS = "delete from loraq.cancellations where requested_at < clock_timestamp() - $1::interval"
