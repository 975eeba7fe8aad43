"""The jobs of a run. They depend on their number and the run's start time alone, so that each can be looked up."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

PROMPT = "Summarise for a colleague who was away what changed in the order, and say what is still open. Item {index}."
MAX_TOKENS = 32
JOBS_PER_MS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The jobs of one run, numbered from 0: the first `jobs` are sent at once, then `paced` at a steady rate.

    `started_ms` is Unix time in milliseconds; ids contain it.
    """

    jobs: int
    paced: int
    tenants: tuple[str, ...]
    started_ms: int

    def job_id(self, index: int) -> UUID:
        """The UUIDv7 of a job: the time increases with the number, the rest is a hash."""
        digest = hashlib.blake2b(b"%d %d" % (self.started_ms, index), digest_size=10).digest()
        random = int.from_bytes(digest, "big")
        timestamp = (self.started_ms + index // JOBS_PER_MS) & (2**48 - 1)
        return UUID(int=timestamp << 80 | 0x7 << 76 | (random >> 68) << 64 | 0b10 << 62 | random & (2**62 - 1))

    def value(self, index: int) -> bytes:
        """The value of a job's record; it uses the base model, so that no adapter loads are measured."""
        request = {
            "job_id": str(self.job_id(index)),
            "tenant": self.tenants[index % len(self.tenants)],
            "prompt": PROMPT.format(index=index),
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": 0.7, "top_p": 0.9},
            "metadata": {"index": index},
        }
        return json.dumps(request).encode()

    def ids(self) -> Iterator[UUID]:
        """The ids of all sent jobs."""
        return (self.job_id(index) for index in range(self.jobs + self.paced))
