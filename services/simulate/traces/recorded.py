"""A trace of the jobs that a database holds."""

from datetime import datetime

from services.postgres.pool import Connection
from services.simulate.traces.trace import DEFAULT_RANK, Trace, from_rows

SUCCEEDED = """
select extract(epoch from accepted_at)::float8 as at_s, jobs.tenant, jobs.adapter, jobs.lane, results.prompt_tokens,
       results.completion_tokens, adapters.rank
from loraq.jobs
join loraq.results using (accepted_on, tenant, job_id)
left join loraq.adapters
    on adapters.tenant = jobs.tenant and adapters.name = jobs.adapter and adapters.version = jobs.adapter_version
where jobs.accepted_at >= $1 and jobs.pool = $2 and results.prompt_tokens > 0 and results.completion_tokens > 0
order by accepted_at
limit $3
"""


async def recorded_trace(
    connection: Connection, pool: str, since: datetime, limit: int, default_rank: int = DEFAULT_RANK
) -> Trace:
    """The first `limit` succeeded jobs of a pool that were accepted since then.

    Raises InputError if there are none.
    """
    rows = [dict(row) for row in await connection.fetch(SUCCEEDED, since, pool, limit)]
    return from_rows(rows, f"the database, since {since.isoformat()},", default_rank)
