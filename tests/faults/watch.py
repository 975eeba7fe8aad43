"""Looks at a run while it goes on: was any offset committed before what stands below it had ended?"""

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
from tests.faults.snapshot import DeadLetter, Sent, Sighting

LOOK_EVERY_S = 0.3
LOOK_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S, MAX_CANCELS = 0.5, 10
FIRST_LOOK_TIMEOUT_S = 60.0


class Watch:
    """Reads the group's offsets first and the tables afterwards, so that a good worker is never accused."""

    def __init__(self, settings: Settings, tables: Tables, sent: Callable[[], Sequence[Sent]]) -> None:
        self._settings = settings
        self._tables = tables
        self._sent = sent
        self._places = [
            TopicPartition(settings.jobs_topic(lane), number) for lane in Lane for number in range(settings.partitions)
        ]
        self._passed: dict[Partition, int] = defaultdict(int)
        self.dead_letters: list[DeadLetter] = []
        self.sightings: dict[Place, Sighting] = {}
        self.looks = 0
        self.trouble = "no offset moved"
        self.reopen = False
        self._looked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look on beside the block, which begins after the first look. What ends the looking early fails the run."""
        looking, first = asyncio.create_task(self._run()), asyncio.create_task(self._looked.wait())
        try:
            await asyncio.wait({looking, first}, timeout=FIRST_LOOK_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._looked.is_set():
                raise AssertionError(f"nobody could look at the offsets before it began: {self.trouble}")
            yield
        finally:
            first.cancel()
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    async def _run(self) -> None:
        """Look until cancelled; while a server is away there is nothing to see."""
        while True:
            try:
                await self._look_on()
            except (ServiceError, KafkaError, OSError) as error:  # what hangs is a TimeoutError, an OSError
                self.trouble = f"{type(error).__name__}: {error}"
                await asyncio.sleep(LOOK_EVERY_S)

    async def _look_on(self) -> None:
        """With one pair of connections, until `reopen` asks for new ones: the dead-letter topic is another then."""
        self.reopen = False
        settings, connections = self._settings, contextlib.AsyncExitStack()
        try:
            admin = await connections.enter_async_context(kafka.admin(settings))
            dead = await connections.enter_async_context(reader(settings, settings.dead_topic))
            while not self.reopen:
                await _within(LOOK_TIMEOUT_S, self.look(admin, dead))
                self._looked.set()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            with contextlib.suppress(TimeoutError):
                await _within(CLOSE_TIMEOUT_S, connections.aclose())

    async def look(self, admin: Any, dead: Any) -> None:
        """One look; what is seen once stays seen."""
        committed = await committed_offsets(admin, self._settings, self._places)
        moved = {Partition(*place): at for place, at in committed.items() if at > self._passed[Partition(*place)]}
        if not moved:
            return
        settled = await self._tables.settled()
        known = set(self.dead_letters)
        self.dead_letters += [
            letter for record in await read_to_end(dead) if (letter := dead_letter_of(record)) not in known
        ]
        set_aside = {letter.source for letter in self.dead_letters}
        for sent in self._sent():
            if sent.place is None or not self._newly_passed(sent.place, moved):
                continue
            if sent.key not in settled and sent.place not in set_aside and not sent.exempt:
                committed_at = Place(sent.place.partition, moved[sent.place.partition])
                self.sightings.setdefault(sent.place, Sighting(committed_at, sent.place))
        self._passed.update(moved)
        self.looks += 1

    def _newly_passed(self, place: Place, moved: dict[Partition, int]) -> bool:
        return self._passed[place.partition] <= place.offset < moved.get(place.partition, 0)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Do it in that time, or raise TimeoutError.

    The library may wait for ever for a broker that is away, and swallow the cancellation of one wait to go on with
    the next.
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
