"""The producer process: sends jobs as fast as possible or at a steady rate.

python -m services.bench.service.load PLAN FIRST COUNT RATE       PLAN is JSON; RATE 0 is as fast as possible

When all records are acknowledged by all replicas, prints one JSON object: when the first one was due, in nanoseconds.
"""

import asyncio
import json
import sys
import time

from services.bench.service.plan import Plan
from services.kafka import clients as kafka
from services.process.settings import Settings, load_settings

BURST_S = 0.005
MAX_UNSENT = 5000


async def send(settings: Settings, topic: str, plan: Plan, first: int, count: int, rate: float) -> int:
    """Send `count` jobs from number `first`; returns when the first was due, Unix time in nanoseconds.

    Job i is due i / rate seconds later, even if the ones before it were late.
    """
    producer = kafka.producer(settings, client_id="loraq-bench")
    with kafka.errors_translated(settings):
        await producer.start()
        try:
            start, start_ns = time.monotonic(), time.time_ns()
            sent, acknowledged = 0, []
            while sent < count:
                due = count if rate == 0 else min(count, int((time.monotonic() - start) * rate) + 1)
                for index in range(first + sent, first + min(due, sent + MAX_UNSENT)):
                    acknowledged.append(await producer.send(topic, plan.value(index)))
                    sent += 1
                if rate:
                    await asyncio.sleep(BURST_S)
                else:
                    await asyncio.gather(*acknowledged)
                    acknowledged.clear()
            await asyncio.gather(*acknowledged)
        finally:
            await producer.stop()
    return start_ns


def main(plan_json: str, first: str, count: str, rate: str) -> None:
    """Send the jobs and print the start time."""
    fields = json.loads(plan_json)
    plan = Plan(**fields | {"tenants": tuple(fields["tenants"])})
    settings = load_settings()
    topic = settings.jobs_topic(settings.lanes[0])
    start_ns = asyncio.run(send(settings, topic, plan, int(first), int(count), float(rate)))
    sys.stdout.write(json.dumps({"start_ns": start_ns}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
