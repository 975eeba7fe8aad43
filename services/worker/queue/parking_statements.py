"""SQL statements for parked jobs, by name.

A row of `parked_jobs` is the request of a job whose Kafka record is no longer needed. It is kept until the job is
terminal: while a worker owns the job, the row is due when that worker's lease expires. A row that waits for a tenant's
limit is due at no time but its deadline; workers claim it when the limit has room.
"""

from services.worker.store.batch import ATTEMPT, DATED, JOB, batch

RECORD = {
    "topic": "text",
    "partition_number": "integer",
    "record_offset": "bigint",
    "record_timestamp_ms": "bigint",
    "record_key": "bytea",
    "request": "bytea",
    "traceparent": "text",
}
DELIVERY = {**JOB, "lane": "text", **RECORD}
REQUEST = {
    **DATED,
    "lane": "text",
    "reason": "text",
    "adapter_digest": "text",
    "cold_for": "interval",
    "alone": "boolean",
    "delay": "interval",
    "deadline": "timestamptz",
    **RECORD,
}

PARK_JOBS = f"""
update loraq.jobs
set state = 'parked', lease_until = null, attempts = sent.attempts
from {batch("sent", ATTEMPT | {"attempts": "integer"})}
where jobs.accepted_on = sent.accepted_on and jobs.tenant = sent.tenant and jobs.job_id = sent.job_id
    and jobs.fence = sent.fence and jobs.state in ('queued', 'running')
returning jobs.tenant, jobs.job_id
"""

STORE_REQUESTS = f"""
insert into loraq.parked_jobs
    (tenant, job_id, accepted_on, pool, lane, reason, adapter_digest, cold_since, alone, due_at, topic,
     partition_number, record_offset, record_timestamp_ms, record_key, request, traceparent)
select
    tenant, job_id, accepted_on, $1, lane, reason, adapter_digest, clock_timestamp() - cold_for, alone,
    coalesce(least(clock_timestamp() + delay, deadline, cancelled_at), 'infinity'), topic, partition_number,
    record_offset, record_timestamp_ms, record_key, request, traceparent
from {batch("sent", REQUEST, first=2)}
left join (select tenant, job_id, requested_at as cancelled_at from loraq.cancellations) as cancelled
    using (tenant, job_id)
on conflict (tenant, job_id) do update
set reason = excluded.reason,
    adapter_digest = excluded.adapter_digest,
    cold_since = excluded.cold_since,
    alone = excluded.alone,
    due_at = excluded.due_at
"""

STORE_DELIVERIES = f"""
insert into loraq.parked_jobs
    (tenant, job_id, accepted_on, pool, lane, reason, due_at, topic, partition_number, record_offset,
     record_timestamp_ms, record_key, request, traceparent)
select
    tenant, job_id, job_keys.accepted_on, $1, sent.lane, 'lease', coalesce(jobs.lease_until, clock_timestamp()), topic,
    partition_number, record_offset, record_timestamp_ms, record_key, request, traceparent
from {batch("sent", DELIVERY, first=2)}
join loraq.job_keys using (tenant, job_id)
join loraq.jobs using (accepted_on, tenant, job_id)
on conflict (tenant, job_id) do nothing
"""

CLAIMED = """
    tenant, job_id, accepted_on, lane, alone, extract(epoch from clock_timestamp() - cold_since)::float8 as cold_for_s,
    topic, partition_number, record_offset, record_timestamp_ms, record_key, request, traceparent
"""

DUE_JOBS = f"""
select {CLAIMED}
from loraq.parked_jobs
where pool = $1 and lane = any($2::text[]) and due_at <= clock_timestamp()
    and (adapter_digest is null
         or due_at <= clock_timestamp() - make_interval(secs => $4)
         or adapter_digest = any($7::text[])
         or not $6 and exists (
            select from loraq.worker_adapters as held
            where held.pool = $1 and held.digest = adapter_digest and held.worker = $5 and held.tier <> 'disk'
         )
         or $8 and not exists (
            select from loraq.worker_adapters as held
            join loraq.worker_status as holder using (pool, worker)
            where held.pool = $1 and held.digest = adapter_digest and held.worker <> $5 and held.tier <> 'disk'
                and holder.engine_ready and not holder.saturated
                and holder.seen_at > clock_timestamp() - make_interval(secs => $9)
         ))
order by due_at
limit $3
for update skip locked
"""

OVER_LIMIT = """
with recursive pairs as (
    (select tenant, lane
     from loraq.parked_jobs
     where pool = $1 and reason = 'limit'
     order by tenant, lane
     limit 1)
    union all
    select following.tenant, following.lane
    from pairs
    cross join lateral (
        select tenant, lane
        from loraq.parked_jobs
        where pool = $1 and reason = 'limit' and (tenant, lane) > (pairs.tenant, pairs.lane)
        order by tenant, lane
        limit 1
    ) as following
)
select tenant, lane from pairs
"""

CLAIM_OVER_LIMIT = f"""
select parked.*
from unnest($2::text[], $3::text[], $4::integer[]) as free (of_tenant, of_lane, places)
cross join lateral (
    select {CLAIMED}
    from loraq.parked_jobs
    where pool = $1 and reason = 'limit' and tenant = of_tenant and lane = of_lane
    order by record_timestamp_ms, record_offset
    limit places
    for update skip locked
) as parked
"""

CLAIM_DUE = f"""
update loraq.jobs
set fence = jobs.fence + 1, state = 'queued', worker = $4, lease_until = clock_timestamp() + $5::interval
from {batch("due", DATED)}
where jobs.accepted_on = due.accepted_on and jobs.tenant = due.tenant and jobs.job_id = due.job_id
    and (jobs.state = 'parked'
         or jobs.state in ('queued', 'running')
         and coalesce(jobs.lease_until, '-infinity') <= clock_timestamp())
returning
    jobs.tenant, jobs.job_id, jobs.accepted_on, jobs.fence, jobs.attempts, jobs.adapter_version,
    extract(epoch from clock_timestamp() - jobs.accepted_at)::float8 as age_s, clock_timestamp() as claimed_at
"""

POSTPONE_LEASED = f"""
update loraq.parked_jobs
set due_at = greatest(jobs.lease_until, clock_timestamp()),
    reason = case parked_jobs.reason when 'limit' then 'lease' else parked_jobs.reason end
from loraq.jobs, {batch("due", DATED)}
where parked_jobs.tenant = due.tenant and parked_jobs.job_id = due.job_id
    and jobs.accepted_on = due.accepted_on and jobs.tenant = due.tenant and jobs.job_id = due.job_id
"""

DELETE_ENDED = f"""
delete from loraq.parked_jobs
using loraq.jobs, {batch("due", DATED)}
where parked_jobs.tenant = due.tenant and parked_jobs.job_id = due.job_id
    and jobs.accepted_on = due.accepted_on and jobs.tenant = due.tenant and jobs.job_id = due.job_id
    and jobs.state in ('succeeded', 'failed', 'cancelled', 'expired')
"""

MAKE_ADAPTER_DUE = """
update loraq.parked_jobs
set due_at = clock_timestamp()
where pool = $1 and adapter_digest = $2 and reason = 'adapter' and due_at > clock_timestamp()
"""
