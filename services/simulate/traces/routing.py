"""Which worker consumes a job's record: murmur2 of its key, as a Kafka client does it, the workers' own assignment of
partitions, and hot adapters over several partitions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.kafka.assignment import Member, assign

SEED, M = 0x9747B28C, 0x5BD1E995
MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Kafka's 32 bit hash of a record's key, unsigned."""
    length = len(data)
    h = (SEED ^ length) & MASK
    whole = length & ~3
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little") * M & MASK
        k = (k ^ (k >> 24)) * M & MASK
        h = (h * M & MASK) ^ k
    if length & 3:
        h = (h ^ int.from_bytes(data[whole:], "little")) * M & MASK
    h = (h ^ (h >> 13)) * M & MASK
    return h ^ (h >> 15)


def partition_of(key: bytes, num_partitions: int) -> int:
    """The partition of a key."""
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions


def partitions_of(key: bytes, num_partitions: int, count: int) -> list[int]:
    """`count` partitions of a hot key: its own, then the others by rendezvous hashing."""
    first = partition_of(key, num_partitions)
    others = sorted(set(range(num_partitions)) - {first}, key=lambda each: -murmur2(b"%b#%d" % (key, each)))
    return [first, *others[: count - 1]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers and their partitions; `spread` is the most partitions of one hot adapter.

    Without `affine` any worker may consume a job.
    """

    num_workers: int = 1
    partitions_per_worker: int = 8
    spread: int = 1
    affine: bool = True


def route(
    adapter: npt.NDArray[np.int32], keys: Sequence[str | None], fleet: Fleet, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """The worker of each job.

    An adapter has as many partitions as its jobs are fair shares of a worker, at most `spread`; its jobs alternate
    between them. Records without a key are spread over all partitions.
    """
    num_partitions = fleet.num_workers * fleet.partitions_per_worker
    if not fleet.affine or fleet.num_workers == 1:
        return rng.integers(fleet.num_workers, size=len(adapter)).astype(np.int32)
    uses = np.bincount(adapter, minlength=len(keys))
    wide = np.minimum(np.ceil(uses * fleet.num_workers / max(1, len(adapter))), fleet.spread).astype(np.int64)
    first = np.array([0 if key is None else partition_of(key.encode(), num_partitions) for key in keys], np.int64)
    partition = first[adapter]
    for number in np.flatnonzero(wide > 1).tolist():
        if (key := keys[number]) is not None:
            among = np.array(partitions_of(key.encode(), num_partitions, int(wide[number])))
            mine = np.flatnonzero(adapter == number)
            partition[mine] = among[np.arange(len(mine)) % len(among)]
    unkeyed = np.array([key is None for key in keys], bool)[adapter]
    partition[unkeyed] = rng.integers(num_partitions, size=int(unkeyed.sum()))
    return owners_of(num_partitions, fleet.num_workers)[partition]


def owners_of(num_partitions: int, num_workers: int) -> npt.NDArray[np.int32]:
    """The worker of each partition, when all workers have just joined."""
    members = {f"{number:06}": Member(frozenset({"jobs"})) for number in range(num_workers)}
    owners = np.zeros(num_partitions, np.int32)
    for name, topics in assign({"jobs": num_partitions}, members).items():
        owners[topics.get("jobs", [])] = int(name)
    return owners
