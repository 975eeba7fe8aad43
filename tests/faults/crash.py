"""Named crash points at which a process is killed, paused or blocked: methods of the product, wrapped from outside.

The product has no code for them. A process started by tests/faults/entry.py with LORAQ_CRASH_AT=after_db_commit kills
itself with SIGKILL when it reaches that point for the LORAQ_CRASH_HIT-th time.
"""

import functools
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer

from services.dispatcher.outbox import Outbox
from services.dispatcher.sender import Sender
from services.s3.store import ObjectStore
from services.worker.engine.bridge import EngineBridge
from services.worker.intake.acceptor import Acceptor
from services.worker.store.jobs import JobStore

Action = Literal["kill", "block", "pause"]


@dataclass(frozen=True)
class Point:
    """A point before or after a call of a method; `counts` decides from the result whether this call is a hit."""

    owner: type
    method: str
    when: Literal["before", "after"]
    counts: Callable[[Any], bool] = lambda _: True


POINTS: dict[str, Point] = {
    "after_fetch": Point(Acceptor, "receive", "before"),
    "before_job_row": Point(JobStore, "accept", "before"),
    "after_job_row": Point(JobStore, "accept", "after"),
    "in_generation": Point(EngineBridge, "add", "after"),
    "after_upload": Point(ObjectStore, "put_bytes", "after"),
    "before_db_write": Point(JobStore, "complete", "before"),
    "after_db_commit": Point(JobStore, "complete", "after"),
    "before_offset_commit": Point(AIOKafkaConsumer, "commit", "before"),
    "after_offset_commit": Point(AIOKafkaConsumer, "commit", "after"),
    "after_webhook_answer": Point(Sender, "send", "after", lambda answer: getattr(answer, "status", 0) // 100 == 2),
    "before_event_record": Point(Outbox, "finish_events", "before"),
}


def arm(name: str, hit: int, action: Action) -> None:
    """Perform the action when this process reaches the point for the `hit`-th time; raises KeyError if unknown."""
    point = POINTS[name]
    wrapped = getattr(point.owner, point.method)
    hits = 0

    def reached(result: Any = None) -> None:
        nonlocal hits
        if point.counts(result) or point.when == "before":
            hits += 1
            if hits == hit:
                _perform(action)

    setattr(point.owner, point.method, _wrapped(wrapped, point.when, reached))


def _wrapped(method: Any, when: str, reached: Callable[..., None]) -> Any:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                reached()
            result = await method(*args, **kwargs)
            if when == "after":
                reached(result)
            return result

        return awaited

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            reached()
        result = method(*args, **kwargs)
        if when == "after":
            reached(result)
        return result

    return called


def _perform(action: Action) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "block":
            time.sleep(3600)  # blocks the whole event loop, as a defect would
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
