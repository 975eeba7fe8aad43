"""The producer, in a process of its own: everything at once, or at a steady rate.

python -m services.bench.service.load PLAN FIRST COUNT RATE       PLAN is JSON; RATE 0 is as fast as the broker takes it

Prints one JSON object when every record is acknowledged by all replicas: when the first one was due, in nanoseconds.
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
    """Send jobs `first` and following; returns when the first was due, nanoseconds since 1970.

    Job i is due i / rate seconds later, however late the ones before it were.
    """
    producer = kafka.producer(settings, client_id="loraq-bench")
    with kafka.errors_translated(settings):
        await producer.start()
        try:
            began, began_ns = time.monotonic(), time.time_ns()
            sent, acknowledged = 0, []
            while sent < count:
                due = count if rate == 0 else min(count, int((time.monotonic() - began) * rate) + 1)
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
    return began_ns


def main(plan_json: str, first: str, count: str, rate: str) -> None:
    """Send and say when it began."""
    fields = json.loads(plan_json)
    plan = Plan(**fields | {"tenants": tuple(fields["tenants"])})
    settings = load_settings()
    topic = settings.jobs_topic(settings.lanes[0])
    began_ns = asyncio.run(send(settings, topic, plan, int(first), int(count), float(rate)))
    sys.stdout.write(json.dumps({"began_ns": began_ns}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
