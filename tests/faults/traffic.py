"""The jobs of a run: produced with acks=all, recorded with the position that the broker assigned."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any
from uuid import UUID

from aiokafka.errors import KafkaError
from confluent_kafka import Producer

from schemas.common import Lane
from services.client.identifiers import uuid7
from services.kafka import clients as kafka
from services.process.settings import Settings
from services.worker.offsets.ledger import Partition, Place
from tests.faults.engine import prompt_of
from tests.faults.recorder import Recorder
from tests.faults.snapshot import Key, Sent
from tests.faults.stack import ADAPTERS, TENANTS

IN_FLIGHT = 200
RETRY_FOR_S, RETRY_DELAY_S = 90.0, 0.2
DUPLICATES = 0.03
POISON_SHARE = 0.01
WITHOUT_WEBHOOK = 0.1
POISON: tuple[bytes | None, ...] = (
    b"not json",
    b"\xff\xfe\x00",
    b"[1, 2, 3]",
    b'{"tenant": "acme"}',
    b'{"tenant": "nobody", "prompt": "hello"}',
    b'{"tenant": "acme", "prompt": "hello", "colour": "red"}',
    b'{"tenant": "acme", "prompt": "hello", "job_id": "seven"}',
)


@dataclass
class Traffic:
    """Everything that a run sent. The seed determines every choice."""

    settings: Settings
    random: Random
    recorder: Recorder
    producer: Any
    sent: list[Sent] = field(default_factory=list)

    async def send(self, count: int, latency_ms: tuple[int, int] = (5, 60), **more: Any) -> list[Key]:
        """Produce `count` jobs at once, along with some duplicates and some poison; returns the jobs' keys."""
        batch = [self._job(self.random.randint(*latency_ms), **more) for _ in range(count)]
        again = [job for job in batch if self.random.random() < DUPLICATES]
        poison = [self._poison() for _ in range(round(count * POISON_SHARE))]
        for start in range(0, len(all_of := [*batch, *again, *poison]), IN_FLIGHT):
            await asyncio.gather(*(self._produce(record) for record in all_of[start : start + IN_FLIGHT]))
        return [job.key for job in batch]

    @asynccontextmanager
    async def flowing(
        self, count: int, per_s: float, latency_ms: tuple[int, int] = (5, 60)
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Produce `count` jobs at a steady rate while the block runs; the exit waits for the last of them."""
        flow = asyncio.create_task(self._flow(count, per_s, latency_ms))
        try:
            yield flow
            await flow
        finally:
            flow.cancel()

    async def _flow(self, count: int, per_s: float, latency_ms: tuple[int, int]) -> None:
        loop = asyncio.get_running_loop()
        started, produced = loop.time(), 0
        while produced < count:
            due = min(count, round((loop.time() - started + 0.1) * per_s))
            if due > produced:
                await self.send(due - produced, latency_ms)
                produced = due
            await asyncio.sleep(0.1)

    async def send_job(self, latency_ms: int, **more: Any) -> Key:
        """Produce one job; `fate` is appended to its prompt, other arguments replace fields of the request."""
        record = self._job(latency_ms, **more)
        await self._produce(record)
        return record.key

    async def send_raw(self, value: bytes | None, fate: str = "dead letter", partition: int | None = None) -> Sent:
        """Produce one record with this value."""
        key = Key("", UUID(int=self.random.getrandbits(128)))
        return await self._produce(_Record(key, value, b"raw", Lane.STANDARD, fate, False, None, partition))

    async def send_compressed(self, value: bytes) -> None:
        """Produce one record that is far longer than its compressed form, as other clients may."""
        topic, offsets = self.settings.jobs_topic(Lane.STANDARD), []
        options = {"compression.type": "gzip", "message.max.bytes": 100_000_000, "acks": "all"}
        client = Producer({"bootstrap.servers": self.settings.kafka_bootstrap, **options})
        client.produce(topic, value, partition=0, on_delivery=lambda _error, message: offsets.append(message.offset()))
        await asyncio.to_thread(client.flush, 30.0)
        key = Key("", UUID(int=self.random.getrandbits(128)))
        self.sent.append(Sent(key, Place(Partition(topic, 0), offsets[0]), "dead letter", webhook=False))

    def _job(
        self,
        latency_ms: int,
        *,
        fate: str = "",
        lane: Lane | None = None,
        deadline_s: float | None = None,
        **fields: Any,
    ) -> "_Record":
        tenant = self.random.choice(TENANTS)
        adapter = self.random.choice((*ADAPTERS, None))
        key = Key(tenant, uuid7())
        webhook = self.random.random() >= WITHOUT_WEBHOOK
        deadline = None if deadline_s is None else time.time() + deadline_s
        request: dict[str, Any] = {
            "tenant": tenant,
            "job_id": str(key.job_id),
            "adapter": adapter,
            "prompt": prompt_of(key, latency_ms, fate),
            "sampling": {"max_tokens": 16},
            "metadata": {"number": len(self.sent)},
        }
        if webhook:
            request["webhook"] = {"url": self.recorder.url(tenant)}
        if deadline is not None:
            request["deadline"] = datetime.fromtimestamp(deadline, UTC).isoformat()
        request |= fields
        record_key = f"{tenant}/{request['adapter']}".encode() if request["adapter"] else None
        lane = lane or self.random.choice(list(Lane))
        return _Record(key, json.dumps(request).encode(), record_key, lane, "job", webhook, deadline, None)

    def _poison(self) -> "_Record":
        key = Key("", UUID(int=self.random.getrandbits(128)))
        value = self.random.choice(POISON)
        return _Record(key, value, None, self.random.choice(list(Lane)), "dead letter", False, None, None)

    async def _produce(self, record: "_Record") -> Sent:
        """Like a correct client: send the record again with the same job_id until a broker acknowledges it."""
        give_up_at = time.monotonic() + RETRY_FOR_S
        while True:
            sent = await self._produce_once(record)
            if sent.place is not None or time.monotonic() > give_up_at:
                return sent
            await asyncio.sleep(RETRY_DELAY_S)

    async def _produce_once(self, record: "_Record") -> Sent:
        place: Place | None = None
        topic = self.settings.jobs_topic(record.lane)
        try:
            got = await self.producer.send_and_wait(
                topic, record.value, key=record.key_bytes, partition=record.partition
            )
        except (KafkaError, OSError):
            pass  # not acknowledged: the checker allows for both outcomes
        else:
            place = Place(Partition(got.topic, got.partition), got.offset)
        sent = Sent(record.key, place, record.fate, record.webhook, record.deadline)  # type: ignore[arg-type]
        self.sent.append(sent)
        return sent


@dataclass(frozen=True)
class _Record:
    key: Key
    value: bytes | None
    key_bytes: bytes | None
    lane: Lane
    fate: str
    webhook: bool
    deadline: float | None
    partition: int | None


@asynccontextmanager
async def open_traffic(settings: Settings, random: Random, recorder: Recorder) -> AsyncIterator[Traffic]:
    """Traffic with its own producer."""
    producer = kafka.producer(settings, client_id="loraq-faults")
    await producer.start()
    try:
        yield Traffic(settings, random, recorder, producer)
    finally:
        await producer.stop()
