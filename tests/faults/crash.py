"""Named points at which a process of the product ends, stops or blocks: methods of the product, wrapped from outside.

The product knows nothing of them. A process started by tests/faults/entry.py with LORAQ_CRASH_AT=after_db_commit ends
there as SIGKILL would end it, when it passes for the LORAQ_CRASH_HIT-th time.
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

How = Literal["kill", "block", "pause"]


@dataclass(frozen=True)
class Point:
    """Before or after a call of a method returns; `answered` asks whether this call counts."""

    owner: type
    method: str
    when: Literal["before", "after"]
    answered: Callable[[Any], bool] = lambda _: True


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


def arm(name: str, hit: int, how: How) -> None:
    """Make this process end at the point when it passes for the `hit`-th time; raises KeyError for no such point."""
    point = POINTS[name]
    wrapped = getattr(point.owner, point.method)
    passes = 0

    def passing(result: Any = None) -> None:
        nonlocal passes
        if point.answered(result) or point.when == "before":
            passes += 1
            if passes == hit:
                _happen(how)

    setattr(point.owner, point.method, _around(wrapped, point.when, passing))


def _around(method: Any, when: str, passing: Callable[..., None]) -> Any:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                passing()
            result = await method(*args, **kwargs)
            if when == "after":
                passing(result)
            return result

        return awaited

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            passing()
        result = method(*args, **kwargs)
        if when == "after":
            passing(result)
        return result

    return called


def _happen(how: How) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "block":
            time.sleep(3600)  # the whole loop, as a defect would block it
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
