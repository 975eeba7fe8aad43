"""What a run sends: jobs that depend on their number and the run's beginning alone, so that each can be looked for."""

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
    """Jobs of one run, numbered from 0: the first `jobs` all at once, then `paced` at a steady rate.

    `began_ms` is milliseconds since 1970; ids carry it.
    """

    jobs: int
    paced: int
    tenants: tuple[str, ...]
    began_ms: int

    def job_id(self, index: int) -> UUID:
        """UUIDv7 of a job: times rise with the numbers, the rest is as good as random."""
        digest = hashlib.blake2b(b"%d %d" % (self.began_ms, index), digest_size=10).digest()
        random = int.from_bytes(digest, "big")
        timestamp = (self.began_ms + index // JOBS_PER_MS) & (2**48 - 1)
        return UUID(int=timestamp << 80 | 0x7 << 76 | (random >> 68) << 64 | 0b10 << 62 | random & (2**62 - 1))

    def value(self, index: int) -> bytes:
        """The record of a job; it asks for the base model, so that nothing but the plane is measured."""
        request = {
            "job_id": str(self.job_id(index)),
            "tenant": self.tenants[index % len(self.tenants)],
            "prompt": PROMPT.format(index=index),
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": 0.7, "top_p": 0.9},
            "metadata": {"index": index},
        }
        return json.dumps(request).encode()

    def ids(self) -> Iterator[UUID]:
        """The id of every job that was sent."""
        return (self.job_id(index) for index in range(self.jobs + self.paced))
