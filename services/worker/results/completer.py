"""Writes outcomes to the database, and only then marks their records as finished."""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Span

from schemas.common import ErrorCode
from services.errors import PermanentError, ServiceError
from services.process import telemetry
from services.s3.store import ObjectStore
from services.worker.in_flight import InFlight
from services.worker.jobs import Job, JobKey, Outcome, Phase, failed
from services.worker.offsets.ledger import Ledger
from services.worker.results.meters import count_finished
from services.worker.results.spans import close_process_span, open_process_span, traceparent_of
from services.worker.store.effects import Completion, completion, is_large
from services.worker.store.jobs import JobStore
from services.worker.store.persistence import Persistence, isolate

MAX_BATCH = 1000
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class _Prepared:
    completion: Completion
    span: Span | None


class Completer:
    """One loop; a batch is the jobs that ended while the previous batch was being written."""

    def __init__(
        self,
        store: JobStore,
        persistence: Persistence,
        objects: ObjectStore,
        ledger: Ledger,
        in_flight: InFlight,
        pool_name: str,
        stale: Callable[[Job], None],
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._objects = objects
        self._ledger = ledger
        self._in_flight = in_flight
        self._pool_name = pool_name
        self._stale = stale
        self._recording = telemetry.recording()
        self._queue: deque[_Prepared] = deque()
        self._urls: dict[JobKey, str] = {}
        self._uploads: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._unsettled = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, outcome: Outcome) -> None:
        """Queue an outcome, a large one after its upload; bounded by the jobs in flight."""
        outcome.job.phase = Phase.COMPLETING
        self._unsettled += 1
        self._idle.clear()
        if is_large(outcome):
            task = asyncio.create_task(self._upload(outcome), name=f"upload {outcome.job.key.job_id}")
            self._uploads.add(task)
            task.add_done_callback(self._uploads.discard)
        else:
            self._enqueue(outcome)

    def _enqueue(self, outcome: Outcome) -> None:
        """Prepare the rows here and not in the loop, so that it overlaps with the loop's waits for the database."""
        self._queue.append(self._prepare(outcome))
        self._wake.set()

    async def _upload(self, outcome: Outcome) -> None:
        """Upload a large output under the digest of its content; if that fails, the row stores it."""
        assert outcome.finished is not None
        content = outcome.finished.text.encode("utf-8", "replace")
        place = self._objects.at(f"results/{outcome.job.key.tenant}/{hashlib.sha256(content).hexdigest()}.txt")
        try:
            await self._objects.put_bytes(place, content, "text/plain; charset=utf-8")
        except ServiceError as error:
            _log.warning("A large output is stored in its row", action="output_upload_failed", reason=str(error))
        else:
            self._urls[outcome.job.key] = place.uri
        self._enqueue(outcome)

    async def flushed(self) -> None:
        """Wait until everything submitted is committed."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write queued outcomes until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
                await self._complete(batch)

    async def _complete(self, prepared: Sequence[_Prepared]) -> None:
        with (
            telemetry.COMPLETION_SECONDS.time(),
            telemetry.tracer().start_as_current_span(telemetry.SPAN_COMPLETE_JOBS),
        ):
            committed = await isolate(prepared, self._write, self._write_failure)
        for each, is_ours in zip(prepared, committed, strict=True):
            self._settle(each, is_ours=is_ours)
        count_finished(
            [each.completion for each, ours in zip(prepared, committed, strict=True) if ours], time.monotonic()
        )

    def _prepare(self, outcome: Outcome) -> _Prepared:
        span = open_process_span(outcome) if self._recording else None
        output_url = self._urls.pop(outcome.job.key, None)
        now, traceparent = time.monotonic(), traceparent_of(outcome, span)
        return _Prepared(completion(outcome, self._pool_name, now, traceparent, output_url), span)

    async def _write(self, prepared: Sequence[_Prepared]) -> list[bool]:
        completions = [each.completion for each in prepared]
        ours = await self._persistence.retry_until_done(partial(self._store.complete, completions))
        return [each.job.key in ours for each in completions]

    async def _write_failure(self, prepared: _Prepared, error: PermanentError) -> bool:
        """Fail a job whose outcome the database cannot store."""
        job = prepared.completion.job
        outcome = failed(job, ErrorCode.ENGINE_ERROR, f"the result cannot be stored: {error}")
        again = completion(outcome, self._pool_name, time.monotonic(), prepared.completion.traceparent)
        ours = await self._persistence.retry_until_done(partial(self._store.complete, [again]))
        return job.key in ours

    def _settle(self, prepared: _Prepared, *, is_ours: bool) -> None:
        outcome = prepared.completion.outcome
        job = outcome.job
        if prepared.span is not None:
            close_process_span(prepared.span)
        self._in_flight.remove(job)
        self._unsettled -= 1
        if not self._unsettled:
            self._idle.set()
        if not is_ours:
            telemetry.STALE_WRITES.inc()
            self._stale(job)
            return
        for place in job.places:
            self._ledger.finish(place)
