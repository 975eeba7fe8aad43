"""Sends jobs at a steady rate, each for an adapter drawn by Zipf's law, routed by key or at random."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias
from uuid import UUID

from schemas.common import Lane
from services.bench.affinity.adapters import owner
from services.bench.service.bench_pool import BenchPool
from services.client.identifiers import uuid7
from services.kafka import clients as kafka

Route: TypeAlias = Literal["key", "random"]
BURST_S = 0.005


@dataclass(frozen=True, slots=True)
class Traffic:
    """`jobs` at `rate` per second over `adapters` adapters; the same `seed` draws the same adapters."""

    jobs: int
    rate: float
    adapters: int
    exponent: float
    seed: int

    def chosen(self) -> list[int]:
        """The adapter of each job."""
        weights = [rank**-self.exponent for rank in range(1, self.adapters + 1)]
        return random.Random(self.seed).choices(range(self.adapters), weights, k=self.jobs)


async def send(bench: BenchPool, traffic: Traffic, route: Route) -> list[UUID]:
    """Send all jobs; returns their ids when every one is acknowledged."""
    settings, order = bench.settings, random.Random(traffic.seed)
    topic = settings.jobs_topic(Lane.STANDARD)
    producer = kafka.producer(settings, client_id="loraq-bench")
    job_ids: list[UUID] = []
    with kafka.errors_translated(settings):
        await producer.start()
        try:
            began, acknowledged = time.monotonic(), []
            for index, adapter in enumerate(traffic.chosen()):
                if (early_s := index / traffic.rate - (time.monotonic() - began)) > 0:
                    await asyncio.sleep(max(early_s, BURST_S))
                job_ids.append(uuid7())
                tenant, name = owner(bench, adapter), f"a{adapter:05}"
                value, key = _value(job_ids[-1], tenant, name), f"{tenant}/{name}".encode()
                partition = order.randrange(settings.partitions) if route == "random" else None
                acknowledged.append(await producer.send(topic, value, key, partition))
            await asyncio.gather(*acknowledged)
        finally:
            await producer.stop()
    return job_ids


def _value(job_id: UUID, tenant: str, adapter: str) -> bytes:
    request = {
        "job_id": str(job_id),
        "tenant": tenant,
        "adapter": adapter,
        "prompt": "What changed in the order, and what is still open?",
        "sampling": {"max_tokens": 16},
    }
    return json.dumps(request).encode()
