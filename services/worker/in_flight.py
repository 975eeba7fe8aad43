"""The jobs in flight in this worker, by key: a second delivery of one joins it instead of running it again."""

from collections import Counter
from collections.abc import Collection, Iterator

from schemas.common import Lane
from services.worker.jobs import Job, JobKey, Phase
from services.worker.offsets.ledger import Partition, Place


class InFlight:
    """Every job from its claim until its outcome is written or another worker owns it."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Job] = {}
        self._lanes: Counter[Lane] = Counter()
        self._joined: dict[JobKey, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, key: JobKey) -> Job | None:
        """The job with that key, if it is in flight."""
        return self._jobs.get(key)

    def add(self, job: Job) -> None:
        """Add a job; no other job with its key may be in flight."""
        assert job.key not in self._jobs, "a job is in flight at most once"
        self._jobs[job.key] = job
        self._lanes[job.lane] += 1
        if len(job.places) > 1:
            self._joined[job.key] = job

    def remove(self, job: Job) -> None:
        """Remove a job, unless another job object has replaced it."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._joined.pop(job.key, None)
            self._lanes[job.lane] -= 1

    def count(self, lane: Lane) -> int:
        """Number of jobs of a lane."""
        return self._lanes[lane]

    def join(self, job: Job, place: Place) -> None:
        """Attach another record of a job: it is finished together with the job."""
        job.places.append(place)
        self._joined[job.key] = job

    def num_joined(self, lane: Lane) -> int:
        """Number of a lane's records beyond the first of each job."""
        return sum(max(0, len(job.places) - 1) for job in self._joined.values() if job.lane == lane)

    def reassigned(self, assigned: Collection[Partition]) -> list[Job]:
        """Waiting jobs whose records are all in partitions that are not assigned to this worker."""
        return [
            job
            for job in self._jobs.values()
            if job.phase is Phase.WAITING
            and job.places
            and all(place.partition not in assigned for place in job.places)
        ]

    def running_in(self, partitions: Collection[Partition]) -> list[Job]:
        """Running or completing jobs with a record in one of these partitions."""
        return [
            job
            for job in self._jobs.values()
            if job.phase is not Phase.WAITING and any(place.partition in partitions for place in job.places)
        ]

    def forget_places(self, partition: Partition) -> None:
        """Drop every place in this partition: its offsets now denote other records."""
        for job in self._jobs.values():
            job.places = [place for place in job.places if place.partition != partition]
