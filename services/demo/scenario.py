"""The demo's steps once its servers are up: tenants, adapters, jobs and the check of the results."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rich.markup import escape

from services.adapters.versions import AdapterRow
from services.demo.check import CheckResult, Row
from services.demo.plan import TENANTS, Adapter, Job, plan_jobs
from services.demo.processes import LoraqProcess
from services.demo.tenancy import ensure_tenants, push_all
from services.demo.traffic import follow, produce, receivers
from services.demo.view import View
from services.localstack.display import Steps
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.s3.store import open_store

SUMMARY = """
select coalesce(j.adapter || '@' || j.adapter_version, 'base') as adapter, count(*) as jobs,
       sum(r.completion_tokens) as tokens, round(avg(r.queue_ms))::int as queue_ms,
       round(avg(r.load_ms))::int as load_ms, round(avg(r.total_ms))::int as total_ms
from loraq.jobs j join loraq.results r using (accepted_on, tenant, job_id)
where j.state = 'succeeded' and j.metadata->>'demo' = '{run}'
group by 1 order by 1
"""


@dataclass(frozen=True)
class DemoResult:
    """The results of one run of the demo."""

    jobs: Sequence[Job]
    rows: Sequence[Row]
    check: CheckResult
    adapters: Sequence[AdapterRow]
    sql: str
    summary: Sequence[dict[str, Any]]
    seconds: float
    """From the first job produced to the last webhook received."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(row.completion_tokens or 0 for row in self.rows)

    @property
    def side_by_side(self) -> tuple[str, list[tuple[str, str, str]]]:
        """The first prompt, and (adapter, rank, answer) of the base model and each adapter, the base first."""
        prompt = self.jobs[0].prompt
        ranks = {adapter.name: str(adapter.rank) for adapter in self.adapters}
        answers = {row.job_id: row.output_text for row in self.rows}
        asked = {job.adapter: job for job in reversed(self.jobs) if job.prompt == prompt}
        ordered = sorted(asked, key=lambda name: int(ranks.get(name or "", "0")))
        lines = [(name, answers.get(asked[name].job_id) or "(no answer)") for name in ordered]
        return prompt, [(name or "base", ranks.get(name or "", ""), answer) for name, answer in lines]


@dataclass(frozen=True)
class Scenario:
    """One run of the demo on servers that are up."""

    settings: Settings
    adapters: Sequence[Adapter]
    num_jobs: int
    view: View
    steps: Steps

    async def run(self, processes: Sequence[LoraqProcess]) -> DemoResult:
        """Wait for the processes, run the jobs and check the results; raises ServiceError if a step fails."""
        run_id = uuid4().hex[:8]
        async with open_pool(self.settings) as pool:
            with self.steps:
                waiting = asyncio.gather(*(self._until_ready(process) for process in processes))
                secrets = await self._tenants(pool)
                pushed = await self._push(pool)
                await waiting
            jobs = plan_jobs(self.adapters, self.num_jobs, run_id)
            async with receivers(secrets) as to:
                with self.view.job_progress(Counter(job.adapter for job in jobs)) as bars:
                    started_at = time.monotonic()
                    await produce(self.settings, jobs, to)
                    rows, check = await follow(pool, jobs, to, bars.update)
                    seconds = time.monotonic() - started_at
            self.steps.done("jobs", f"{len(jobs)} produced to {len({job.lane for job in jobs})} lanes")
            sql = SUMMARY.strip().format(run=run_id)
            async with transaction(pool, "read the demo's summary") as connection:
                summary = [dict(row) for row in await connection.fetch(sql)]
        return DemoResult(jobs, rows, check, pushed, sql, summary, seconds)

    async def _until_ready(self, process: LoraqProcess) -> None:
        await process.until_ready(lambda reason: self.steps.now(process.name, reason))
        self.steps.done(process.name, f"{process.address}/metrics")

    async def _tenants(self, pool: Pool) -> dict[str, str]:
        secrets = await ensure_tenants(pool, self.settings, TENANTS)
        self.steps.done("tenants", ", ".join(TENANTS))
        return secrets

    async def _push(self, pool: Pool) -> list[AdapterRow]:
        self.steps.now("adapters", "pushing to S3, waiting for the registrar")
        async with open_store(self.settings) as store:
            pushed = await push_all(pool, store, self.settings, self.adapters)
        owned = [f"{tenant}: {' '.join(row.ref for row in pushed if row.tenant == tenant)}" for tenant in TENANTS]
        self.steps.done("adapters", escape("; ".join(owned)) if pushed else "none fits this base model")
        return pushed
