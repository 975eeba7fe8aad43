"""The worker's SQL statements, by name. Each takes arrays and costs one round trip for any batch size.

Rows are locked in key order, so that two workers never deadlock. A membership test wrapped in `is true` uses a hash
table: as a plain condition it would be planned as a join, and that plan, which expects few rows (`batch.py`), would be
a nested loop.

Each statement may be repeated, because a lost reply leaves open whether the write was done. So attempts are set and not
incremented, and a completion recognises a row that it wrote itself by its fence and state.
"""

from services.worker.store.batch import ATTEMPT, DATED, JOB, batch

NEW_JOB = {
    **JOB,
    "fingerprint": "bytea",
    "adapter": "text",
    "adapter_version": "integer",
    "lane": "text",
    "metadata": "text",
    "replay_of": "uuid",
    "starts": "boolean",
}
ENDED = {
    **ATTEMPT,
    **dict.fromkeys(("state", "error_code", "error_message", "adapter"), "text"),
    "adapter_version": "integer",
    **dict.fromkeys(("output_text", "output_url", "token_ids", "logprobs", "finish_reason"), "text"),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), "integer"),
    **dict.fromkeys(("queue_ms", "load_ms", "first_token_ms", "total_ms"), "float8"),
}
EFFECT = {
    "place": "bigint",
    "event_id": "uuid",
    "kind": "text",
    **JOB,
    **dict.fromkeys(("type", "body", "target", "traceparent"), "text"),
}

TENANTS = """
select tenant, producer_key, disabled_at is not null as disabled
from loraq.tenants
where tenant = any($1::text[])
"""

PRODUCER_KEYS = "select producer_key from loraq.tenants"

ANY_TENANT = "select exists (select from loraq.tenants where disabled_at is null)"

INSERT_NEW = f"""
with sent as (
    select *
    from {batch("sent", NEW_JOB, numbered=True)}
), claimed as (
    insert into loraq.job_keys (tenant, job_id, accepted_on, fingerprint)
    select tenant, job_id, (now() at time zone 'UTC')::date, fingerprint
    from sent
    order by tenant, job_id
    on conflict do nothing
    returning tenant, job_id
), cancelled as (
    select place from sent join loraq.cancellations using (tenant, job_id)
), inserted as (
    insert into loraq.jobs
        (tenant, job_id, pool, adapter, adapter_version, lane, state, attempts, started_at, accepted_on, accepted_at,
         worker, metadata, fence, lease_until, replay_of)
    select
        tenant, job_id, $10, adapter, adapter_version, lane, case when runs then 'running' else 'queued' end,
        runs::integer, case when runs then clock_timestamp() end, (now() at time zone 'UTC')::date, now(),
        $11, metadata::jsonb, 1, clock_timestamp() + $12::interval, replay_of
    from (select *, starts and place not in (select place from cancelled) as runs from sent) as fresh
    where ((tenant, job_id) in (select tenant, job_id from claimed)) is true
)
select
    (now() at time zone 'UTC')::date as accepted_on, 1::bigint as fence, 0 as attempts, 0::float8 as age_s,
    array(select place from sent where ((tenant, job_id) in (select tenant, job_id from claimed)) is not true) as known,
    array(select place from cancelled) as cancelled
"""

KNOWN_JOBS = f"""
select
    tenant, job_id, accepted_on, fingerprint, state, attempts, adapter_version,
    greatest(extract(epoch from lease_until - clock_timestamp()), 0)::float8 as lease_left_s
from {batch("sent", JOB)}
join loraq.job_keys using (tenant, job_id)
join loraq.jobs using (accepted_on, tenant, job_id)
order by tenant, job_id
for update of jobs
"""

CLAIM_JOBS = f"""
update loraq.jobs
set fence = jobs.fence + 1,
    state = 'queued',
    worker = $5,
    lease_until = clock_timestamp() + $6::interval,
    adapter_version = coalesce(jobs.adapter_version, sent.adapter_version)
from {batch("sent", DATED | {"adapter_version": "integer"})}
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
returning
    jobs.tenant, jobs.job_id, jobs.accepted_on, jobs.fence, jobs.attempts,
    extract(epoch from clock_timestamp() - jobs.accepted_at)::float8 as age_s
"""

START_JOBS = f"""
update loraq.jobs
set state = 'running',
    attempts = sent.attempts,
    started_at = clock_timestamp(),
    worker = $7,
    lease_until = clock_timestamp() + $8::interval
from {batch("sent", ATTEMPT | {"deadline": "timestamptz", "attempts": "integer"})}
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
    and jobs.fence = sent.fence and jobs.state in ('queued', 'running')
    and (sent.deadline is null or sent.deadline > clock_timestamp())
returning jobs.tenant, jobs.job_id, jobs.attempts
"""

RENEW_LEASES = f"""
update loraq.jobs
set lease_until = clock_timestamp() + $5::interval
from {batch("sent", ATTEMPT)}
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
    and jobs.fence = sent.fence and jobs.state in ('queued', 'running')
returning jobs.tenant, jobs.job_id
"""

RELEASE_JOBS = f"""
update loraq.jobs
set lease_until = null, state = 'queued', attempts = sent.attempts
from {batch("sent", ATTEMPT | {"attempts": "integer"})}
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
    and jobs.fence = sent.fence and jobs.state in ('queued', 'running')
"""

COMPLETE_JOBS = f"""
with ended as (
    select *
    from {batch("ended", ENDED, numbered=True)}
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
), repeated as (
    select ended.place
    from ended join loraq.jobs using (accepted_on, tenant, job_id)
    where jobs.fence = ended.fence and jobs.state = ended.state
        and (select count(*) from settled) < (select count(*) from ended)
), judged as (
    select
        ended.*, place in (select place from settled) as is_ours, place in (select place from repeated) as is_repeated
    from ended
), stored as (
    insert into loraq.results
        (accepted_on, tenant, job_id, output_text, output_url, output_token_ids, logprobs, finish_reason,
         prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms)
    select
        accepted_on, tenant, job_id, output_text, output_url, token_ids::integer[], logprobs::jsonb, finish_reason,
        prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms
    from judged
    where is_ours and state = 'succeeded'
), usage as (
    insert into loraq.usage_hourly
        (tenant, adapter, adapter_version, hour, jobs, prompt_tokens, cached_tokens, completion_tokens, wasted_tokens)
    select
        tenant, adapter, adapter_version, date_trunc('hour', now(), 'UTC'), count(*) filter (where counts),
        coalesce(sum(prompt_tokens) filter (where counts), 0), coalesce(sum(cached_tokens) filter (where counts), 0),
        coalesce(sum(completion_tokens) filter (where counts), 0),
        coalesce(sum(completion_tokens) filter (where not counts), 0)
    from (select *, is_ours and state = 'succeeded' as counts from judged
          where completion_tokens is not null and not is_repeated
              and (is_ours or not exists (select from repeated))) as spent
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
    from {batch("effect", EFFECT, first=len(ENDED) + 1)}
    where (place in (select place from settled)) is true
)
select
    array(select place from settled union all select place from repeated) as ours,
    (select pg_notify('loraq_outbox', '') where exists (select from settled)) as dispatchers_woken
"""

CANCEL_JOBS = f"""
select loraq.cancel_job(tenant, job_id)
from {batch("asked", JOB)}
join loraq.tenants using (tenant)
"""

CANCELLED_AMONG = f"""
select tenant, job_id
from {batch("sent", JOB)}
join loraq.cancellations using (tenant, job_id)
"""

DELETE_OLD_CANCELLATIONS = "delete from loraq.cancellations where requested_at < clock_timestamp() - $1::interval"

MAKE_JOBS_DUE = f"""
update loraq.parked_jobs
set due_at = clock_timestamp()
from {batch("released", JOB)}
where parked_jobs.tenant = released.tenant and parked_jobs.job_id = released.job_id
"""
