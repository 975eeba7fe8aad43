"""Watch a run for offsets that are committed before the records below them have ended."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.common import Lane
from services.errors import ServiceError
from services.kafka import clients as kafka
from services.process.settings import Settings
from services.worker.offsets.ledger import Partition, Place
from tests.faults.reading import Tables, committed_offsets, dead_letter_of, read_to_end, reader
from tests.faults.snapshot import DeadLetter, EarlyCommit, Sent

POLL_EVERY_S = 0.3
POLL_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S, MAX_CANCELS = 0.5, 10
FIRST_POLL_TIMEOUT_S = 60.0


class Watch:
    """Polls the group's offsets first and the tables afterwards, so that a correct worker is never reported."""

    def __init__(self, settings: Settings, tables: Tables, sent: Callable[[], Sequence[Sent]]) -> None:
        self._settings = settings
        self._tables = tables
        self._sent = sent
        self._places = [
            TopicPartition(settings.jobs_topic(lane), number) for lane in Lane for number in range(settings.partitions)
        ]
        self._passed: dict[Partition, int] = defaultdict(int)
        self.dead_letters: list[DeadLetter] = []
        self.early_commits: dict[Place, EarlyCommit] = {}
        self.polls = 0
        self.last_error = "no offset moved"
        self.reopen = False
        self._polled = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll while the block runs; the block starts after the first poll. An unexpected error fails the run."""
        polling, first = asyncio.create_task(self._run()), asyncio.create_task(self._polled.wait())
        try:
            await asyncio.wait({polling, first}, timeout=FIRST_POLL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._polled.is_set():
                raise AssertionError(f"the watch could not read the offsets before the run: {self.last_error}")
            yield
        finally:
            first.cancel()
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling

    async def _run(self) -> None:
        """Poll until cancelled; reconnect after an error."""
        while True:
            try:
                await self._poll_repeatedly()
            except (ServiceError, KafkaError, OSError) as error:  # TimeoutError is an OSError
                self.last_error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(POLL_EVERY_S)

    async def _poll_repeatedly(self) -> None:
        """Poll on one pair of connections until `reopen` is set, because the dead-letter topic was recreated."""
        self.reopen = False
        settings, connections = self._settings, contextlib.AsyncExitStack()
        try:
            admin = await connections.enter_async_context(kafka.admin(settings))
            dead = await connections.enter_async_context(reader(settings, settings.dead_topic))
            while not self.reopen:
                await _within(POLL_TIMEOUT_S, self.poll(admin, dead))
                self._polled.set()
                await asyncio.sleep(POLL_EVERY_S)
        finally:
            with contextlib.suppress(TimeoutError):
                await _within(CLOSE_TIMEOUT_S, connections.aclose())

    async def poll(self, admin: Any, dead: Any) -> None:
        """Poll once; early commits accumulate."""
        committed = await committed_offsets(admin, self._settings, self._places)
        moved = {Partition(*place): at for place, at in committed.items() if at > self._passed[Partition(*place)]}
        if not moved:
            return
        settled = await self._tables.settled()
        known = set(self.dead_letters)
        self.dead_letters += [
            dead_letter for record in await read_to_end(dead) if (dead_letter := dead_letter_of(record)) not in known
        ]
        dead_lettered = {dead_letter.source for dead_letter in self.dead_letters}
        for sent in self._sent():
            if sent.place is None or not self._newly_passed(sent.place, moved):
                continue
            if sent.key not in settled and sent.place not in dead_lettered and not sent.exempt:
                committed_at = Place(sent.place.partition, moved[sent.place.partition])
                self.early_commits.setdefault(sent.place, EarlyCommit(committed_at, sent.place))
        self._passed.update(moved)
        self.polls += 1

    def _newly_passed(self, place: Place, moved: dict[Partition, int]) -> bool:
        return self._passed[place.partition] <= place.offset < moved.get(place.partition, 0)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Complete the work in time or raise TimeoutError.

    The library may wait indefinitely for a broker that is down, and may swallow a cancellation and go on to its next
    wait, hence several attempts to cancel.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        for _ in range(MAX_CANCELS):
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
            if task.done():
                break
        raise TimeoutError(f"the broker did not answer within {seconds:g} s")
    finally:
        task.cancel()
