"""Measures the time from when a record is due until another connection sees its job's terminal row.

Each row holds the id of the transaction that wrote it. A watcher that takes a snapshot of the database at every
notification knows when each transaction became visible, without reading rows during the run.
"""

import asyncio
import math
import time
from bisect import bisect_left
from dataclasses import dataclass

import asyncpg

from services.bench.service.bench_pool import BenchPool

CHANNEL = "loraq_outbox"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was visible at `at_ns`: transactions below `xmax` that are not in `running`."""

    at_ns: int
    xmax: int
    running: frozenset[int]

    def shows(self, transaction: int) -> bool:
        """Whether the rows of a transaction that has committed since were visible."""
        return transaction < self.xmax and transaction not in self.running


def snapshot(text: str, at_ns: int) -> Snapshot:
    """Parse the database's text form, `xmin:xmax:xip,…`."""
    _, xmax, running = text.split(":")
    return Snapshot(at_ns, int(xmax), frozenset(int(each) for each in running.split(",") if each))


def first_seen_ns(transaction: int, snapshots: list[Snapshot]) -> int | None:
    """When a committed transaction was first visible; None if it never was. Snapshots are in chronological order."""
    index = bisect_left(snapshots, True, key=lambda each: each.shows(transaction))
    return snapshots[index].at_ns if index < len(snapshots) else None


class Watcher:
    """Takes a snapshot at every commit of a batch, on its own connection."""

    def __init__(self, bench: BenchPool) -> None:
        self._url = bench.settings.database_url.get_secret_value()
        self._wake = asyncio.Event()
        self.snapshots: list[Snapshot] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        connection = await asyncpg.connect(self._url)
        try:
            await connection.add_listener(CHANNEL, lambda *_: self._wake.set())
            while True:
                text = await connection.fetchval("select pg_current_snapshot()::text")
                self.snapshots.append(snapshot(text, time.time_ns()))
                await self._wake.wait()
                self._wake.clear()
        finally:
            connection.terminate()


def percentile(ordered: list[float], share: float) -> float:
    """The nearest-rank percentile of a sorted, non-empty list: the least value that `share` of it does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]
