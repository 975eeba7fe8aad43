"""The jobs that this worker holds, by key: a second delivery of one joins it instead of running it again."""

from collections import Counter
from collections.abc import Collection, Iterator

from schemas.common import Lane
from services.worker.jobs import Job, JobKey, Phase
from services.worker.offsets.ledger import Partition, Place


class Held:
    """Every job from its taking to its commit."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Job] = {}
        self._lanes: Counter[Lane] = Counter()
        self._joined: dict[JobKey, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, key: JobKey) -> Job | None:
        """The held job of that key."""
        return self._jobs.get(key)

    def add(self, job: Job) -> None:
        """Hold a job; no other of its key may be held."""
        assert job.key not in self._jobs, "a job is taken once at a time"
        self._jobs[job.key] = job
        self._lanes[job.lane] += 1
        if len(job.places) > 1:
            self._joined[job.key] = job

    def remove(self, job: Job) -> None:
        """Let go of a job, if it is still this one that is held."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._joined.pop(job.key, None)
            self._lanes[job.lane] -= 1

    def count(self, lane: Lane) -> int:
        """Held jobs of a lane."""
        return self._lanes[lane]

    def join(self, job: Job, place: Place) -> None:
        """Another record of a held job came: it is finished with the job."""
        job.places.append(place)
        self._joined[job.key] = job

    def num_joined(self, lane: Lane) -> int:
        """Records of a lane beyond the first of each held job."""
        return sum(max(0, len(job.places) - 1) for job in self._joined.values() if job.lane == lane)

    def strays(self, assigned: Collection[Partition]) -> list[Job]:
        """Waiting jobs whose every record stands in a partition that belongs to another worker now."""
        return [
            job
            for job in self._jobs.values()
            if job.phase is Phase.WAITING
            and job.places
            and all(place.partition not in assigned for place in job.places)
        ]

    def running_in(self, partitions: Collection[Partition]) -> list[Job]:
        """Jobs with a record in one of these partitions that are past waiting."""
        return [
            job
            for job in self._jobs.values()
            if job.phase is not Phase.WAITING and any(place.partition in partitions for place in job.places)
        ]

    def displace(self, partition: Partition) -> None:
        """Offsets of this partition mean other records from now on: no job stands there any more."""
        for job in self._jobs.values():
            job.places = [place for place in job.places if place.partition != partition]
