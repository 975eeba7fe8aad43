"""Limits on attempts, running time and output size. Pure policy: `now` is monotonic seconds."""

from dataclasses import dataclass

from schemas.common import ErrorCode, JobState
from services.worker.engine.protocol import Finished
from services.worker.jobs import Job, Outcome, failed


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a worker's engine. `places` is a batch, `capacity` the most jobs in it: a batch, and some to follow."""

    places: int
    capacity: int
    default_timeout_s: float
    max_attempts: int
    max_result_bytes: int

    def outcome(self, job: Job, finished: Finished) -> Outcome:
        """The outcome of a job that the engine has finished: failed if its output is too large."""
        num_bytes = len(finished.text.encode("utf-8", "replace"))
        if num_bytes > self.max_result_bytes:
            bound = f"LORAQ_MAX_RESULT_BYTES, {self.max_result_bytes}"
            message = f"the output has {num_bytes} bytes, more than {bound}; request fewer tokens"
            return failed(job, ErrorCode.RESULT_TOO_LARGE, message, finished)
        return Outcome(job, JobState.SUCCEEDED, finished=finished)

    def exhausted(self, job: Job, reason: str) -> Outcome | None:
        """The outcome after the engine failed on a job: None while attempts are left."""
        if job.attempts < self.max_attempts:
            return None
        message = f"the engine failed on this job {job.attempts} times (LORAQ_MAX_ATTEMPTS): {reason}"
        return failed(job, ErrorCode.ENGINE_ERROR, message)

    def last_of_several_is_next(self, job: Job) -> bool:
        """Whether the job has failed before and has one attempt left."""
        return 0 < job.attempts == self.max_attempts - 1

    def is_overdue(self, job: Job, now: float) -> bool:
        """Whether a started job has exceeded its timeout."""
        assert job.started_at is not None
        timeout_ms = job.request.timeout_ms
        return now > job.started_at + (self.default_timeout_s if timeout_ms is None else timeout_ms / 1000)

    def timed_out(self, job: Job) -> Outcome:
        """The outcome of a job that exceeded its timeout."""
        bound_ms = job.request.timeout_ms or round(self.default_timeout_s * 1000)
        return failed(job, ErrorCode.TIMEOUT, f"the job ran longer than its {bound_ms} ms")
