"""Every SQL statement of the worker, by name. Arrays in, one round trip each, whatever the batch's size.

Rows are touched in the order of their keys, so that two workers never wait for each other in a circle. A membership
wrapped in `is true` is looked up in a hash table: as a plain condition it would be planned as a join, and a prepared
statement's plan, which expects few rows, would compare each with each.
"""

TENANTS = """
select tenant, producer_key, disabled_at is not null as disabled
from loraq.tenants
where tenant = any($1::text[])
"""

ANY_TENANT = "select exists (select from loraq.tenants where disabled_at is null)"

TAKE_FRESH = """
with sent as (
    select *
    from unnest($1::text[], $2::uuid[], $3::bytea[], $4::text[], $5::integer[], $6::text[], $7::text[], $8::uuid[],
                $9::boolean[])
        with ordinality as sent (
            tenant, job_id, fingerprint, adapter, adapter_version, lane, metadata, replay_of, starts, place)
), claimed as (
    insert into loraq.job_keys (tenant, job_id, accepted_on, fingerprint)
    select tenant, job_id, (now() at time zone 'UTC')::date, fingerprint
    from sent
    order by tenant, job_id
    on conflict do nothing
    returning tenant, job_id
), called_off as (
    select place from sent join loraq.cancellations using (tenant, job_id)
), made as (
    insert into loraq.jobs
        (tenant, job_id, pool, adapter, adapter_version, lane, state, attempts, started_at, accepted_on, accepted_at,
         worker, metadata, fence, lease_until, replay_of)
    select
        tenant, job_id, $10, adapter, adapter_version, lane, case when runs then 'running' else 'queued' end,
        runs::integer, case when runs then clock_timestamp() end, (now() at time zone 'UTC')::date, now(),
        $11, metadata::jsonb, 1, clock_timestamp() + $12::interval, replay_of
    from (select *, starts and place not in (select place from called_off) as runs from sent) as fresh
    where ((tenant, job_id) in (select tenant, job_id from claimed)) is true
)
select
    (now() at time zone 'UTC')::date as accepted_on, 1::bigint as fence, 0 as attempts, 0::float8 as age_s,
    array(select place from sent where ((tenant, job_id) in (select tenant, job_id from claimed)) is not true) as known,
    array(select place from called_off) as called_off
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

COMPLETE_JOBS = """
with ended as (
    select *
    from unnest($1::date[], $2::text[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::text[],
                $9::integer[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::integer[],
                $16::integer[], $17::integer[], $18::float8[], $19::float8[], $20::float8[], $21::float8[])
        with ordinality as ended (
            accepted_on, tenant, job_id, fence, state, error_code, error_message, adapter, adapter_version,
            output_text, output_url, token_ids, logprobs, finish_reason, prompt_tokens, cached_tokens,
            completion_tokens, queue_ms, load_ms, first_token_ms, total_ms, place)
), settled as (
    update loraq.jobs
    set state = ended.state,
        error_code = ended.error_code,
        error_message = ended.error_message,
        finished_at = clock_timestamp(),
        lease_until = null
    from ended
    where jobs.accepted_on = ended.accepted_on and jobs.tenant = ended.tenant and jobs.job_id = ended.job_id
        and jobs.fence = ended.fence and jobs.state in ('queued', 'running')
    returning ended.place
), judged as (
    select ended.*, place in (select place from settled) as is_ours from ended
), stored as (
    insert into loraq.results
        (accepted_on, tenant, job_id, output_text, output_url, output_token_ids, logprobs, finish_reason,
         prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms)
    select
        accepted_on, tenant, job_id, output_text, output_url, token_ids::integer[], logprobs::jsonb, finish_reason,
        prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms
    from judged
    where is_ours and state = 'succeeded'
), used as (
    insert into loraq.usage_hourly
        (tenant, adapter, adapter_version, hour, jobs, prompt_tokens, cached_tokens, completion_tokens, wasted_tokens)
    select
        tenant, adapter, adapter_version, date_trunc('hour', now(), 'UTC'), count(*) filter (where counts),
        coalesce(sum(prompt_tokens) filter (where counts), 0), coalesce(sum(cached_tokens) filter (where counts), 0),
        coalesce(sum(completion_tokens) filter (where counts), 0),
        coalesce(sum(completion_tokens) filter (where not counts), 0)
    from (select *, is_ours and state = 'succeeded' as counts from judged where completion_tokens is not null) as spent
    group by tenant, adapter, adapter_version
    order by tenant, adapter, adapter_version
    on conflict (tenant, adapter, adapter_version, hour) do update
    set jobs = usage_hourly.jobs + excluded.jobs,
        prompt_tokens = usage_hourly.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = usage_hourly.cached_tokens + excluded.cached_tokens,
        completion_tokens = usage_hourly.completion_tokens + excluded.completion_tokens,
        wasted_tokens = usage_hourly.wasted_tokens + excluded.wasted_tokens
), announced as (
    insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body, target, traceparent)
    select event_id, kind, tenant, job_id, $31, type, body, target, traceparent
    from unnest($22::bigint[], $23::uuid[], $24::text[], $25::text[], $26::uuid[], $27::text[], $28::text[],
                $29::text[], $30::text[])
        as effect (place, event_id, kind, tenant, job_id, type, body, target, traceparent)
    where (place in (select place from settled)) is true
)
select
    array(select place from settled) as ours,
    (select pg_notify('loraq_outbox', '') where exists (select from settled)) as dispatchers_woken
"""

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
