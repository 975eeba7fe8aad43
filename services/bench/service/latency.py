"""From a record's due time to the moment at which another connection sees its row.

A row names the transaction that wrote it. A watcher that looks at the database's snapshot at every notification knows
when each transaction became visible, without reading a row while the run is on.
"""

import asyncio
import math
import time
from bisect import bisect_left
from dataclasses import dataclass

import asyncpg

from services.bench.service.bench_pool import Place

CHANNEL = "loraq_outbox"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was visible at a moment: transactions below `xmax` that are not in `running`."""

    at_ns: int
    xmax: int
    running: frozenset[int]

    def shows(self, transaction: int) -> bool:
        """Whether the transaction's rows could be seen, given that it has committed by now."""
        return transaction < self.xmax and transaction not in self.running


def snapshot(text: str, at_ns: int) -> Snapshot:
    """Of the database's own form, `xmin:xmax:xip,…`."""
    _, xmax, running = text.split(":")
    return Snapshot(at_ns, int(xmax), frozenset(int(each) for each in running.split(",") if each))


def first_seen_ns(transaction: int, snapshots: list[Snapshot]) -> int | None:
    """When a committed transaction was first seen; None if it never was. Snapshots are in the order of time."""
    place = bisect_left(snapshots, True, key=lambda each: each.shows(transaction))
    return snapshots[place].at_ns if place < len(snapshots) else None


class Watcher:
    """Notes a snapshot at every commit of a batch, on a connection of its own."""

    def __init__(self, place: Place) -> None:
        self._url = place.settings.database_url.get_secret_value()
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
    """The least value of an ordered, non-empty list that at least `share` of it does not exceed: the nearest rank."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]
