"""Row 19: a cancellation races its job's completion, a thousand times."""

import asyncio
from collections import Counter

from schemas.control import Cancellation
from tests.faults.experiment import experiment
from tests.faults.run import Run
from tests.faults.snapshot import Key

CANCEL = "select loraq.cancel_job($1, $2)"


@experiment(
    "19",
    "cancel racing completion, a thousand times",
    "one terminal state, one event for it",
    jobs=1000,
    max_batch_size=128,
)
async def cancelled_at_the_end(run: Run) -> None:
    """Cancel each job around the time it ends, before, during and after its run, by SQL or by the control topic."""
    async with run.dispatcher(), run.worker():
        flow = [asyncio.create_task(_job_and_cancellation(run)) for _ in range(run.count)]
        await asyncio.gather(*flow)
        await run.wait_settled()
    states = Counter(job.state for job in await run.tables.jobs())
    run.expect(set(states) <= {"succeeded", "cancelled"}, f"the jobs ended as {dict(states)}")
    run.expect(
        min(states["succeeded"], states["cancelled"]) > run.count // 20,
        f"one side nearly always won the race: {dict(states)}",
    )
    run.notes.append(f"{states['cancelled']} cancelled, {states['succeeded']} succeeded")


async def _job_and_cancellation(run: Run) -> None:
    start_after_s, latency_ms = run.random.uniform(0.0, 12.0), run.random.randint(100, 600)
    by_topic, cancel_after_s = run.random.random() < 0.3, run.random.uniform(0.0, 2.2) * latency_ms / 1000
    await asyncio.sleep(start_after_s)
    key = await run.traffic.send_job(latency_ms)
    await asyncio.sleep(cancel_after_s)
    await (_cancel_by_topic(run, key) if by_topic else run.tables.rows(CANCEL, *key))


async def _cancel_by_topic(run: Run, key: Key) -> None:
    value = Cancellation(tenant=key.tenant, job_id=key.job_id).model_dump_json().encode()
    await run.traffic.producer.send_and_wait(run.settings.control_topic, value, key=key.tenant.encode())
