"""Prepares requests in an engine process: rendering and tokenizing run in a thread in parallel with steps."""

import heapq
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine import Request

POST_AFTER_S = 0.005
"""Results are passed on together, so that a batch is not begun for the first of them alone, but not held for longer."""
CLASS_BYTES = 64 * 1024
"""Of a tenant's requests smaller ones go first, by multiples of this size; those of one class in order."""
TOKEN_BYTES = 4
NICENESS = 10


@dataclass(slots=True, eq=False)
class Preparing:
    """A request that is being prepared; `added_at` is monotonic seconds. `error` or `prepared` is set in the end."""

    request: Request
    number: int
    added_at: float
    cancelled: bool = False
    prepared: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Requests whose preparation has ended, oldest first."""

    requests: tuple[Preparing, ...]


@dataclass(slots=True)
class _Turns:
    """Requests that wait, by tenant; tenants take turns, one request each. Used under the lock."""

    waiting: dict[str, list[tuple[int, int, Preparing]]] = field(default_factory=dict)
    tenants: deque[str] = field(default_factory=deque)

    def add(self, each: Preparing) -> None:
        tenant = each.request.tenant
        if tenant not in self.waiting:
            self.waiting[tenant] = []
            self.tenants.append(tenant)
        heapq.heappush(self.waiting[tenant], (size(each.request) // CLASS_BYTES, each.number, each))

    def next(self) -> Preparing | None:
        if not self.tenants:
            return None
        tenant = self.tenants.popleft()
        *_, each = heapq.heappop(self.waiting[tenant])
        if self.waiting[tenant]:
            self.tenants.append(tenant)
        else:
            del self.waiting[tenant]
        return each


def size(request: Request) -> int:
    """About as many bytes as a request's prompt has."""
    if request.prompt is not None:
        return len(request.prompt)
    if request.messages is not None:
        return sum(len(value) for message in request.messages for value in _values(message))
    return TOKEN_BYTES * len(request.prompt_token_ids or ())


def _values(message: Mapping[str, str]) -> Iterable[str]:
    return (value for value in message.values() if isinstance(value, str))


def _give_way() -> None:
    """Let the threads of steps go before this one: each step waits for the slowest of them. Linux alone can."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class EngineInputs:
    """Prepares requests for the engine loop.

    A daemon thread calls `engine.prepare` for one request after another: a large prompt, or a chat template that takes
    its time, delays neither steps nor another tenant's requests by more than the one that is being prepared. What waits
    is bounded by the parent, which has only so many requests in the engine at a time. `post` passes results to the
    loop, which calls `take`; all other methods are the loop's as well.
    """

    def __init__(self, engine: Any, post: Callable[[Prepared], None]) -> None:
        self._engine, self._post = engine, post
        self._turns, self._changed = _Turns(), threading.Condition()
        self._numbers = itertools.count()
        self._open: dict[str, Preparing] = {}
        self.num_prepared = 0
        threading.Thread(target=self._prepare_loop, name="inputs", daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    def oldest_s(self, now: float) -> float:
        """Seconds for which the oldest request has been here; 0 if there is none."""
        oldest = next(iter(self._open.values()), None)
        return 0.0 if oldest is None else now - oldest.added_at

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, each with a `request_id`."""
        now = time.monotonic()
        added = [Preparing(request, next(self._numbers), now) for request in requests]
        self._open.update((str(each.request.request_id), each) for each in added)
        with self._changed:
            for each in added:
                self._turns.add(each)
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        """Drop a request; False if it is not being prepared."""
        dropped = self._open.pop(request_id, None)
        if dropped is not None:
            dropped.cancelled = True
        return dropped is not None

    def take(self, prepared: Prepared) -> list[Preparing]:
        """The results for the engine: those of requests that were not cancelled meanwhile."""
        self.num_prepared += len(prepared.requests)
        ended = [each for each in prepared.requests if not each.cancelled]
        for each in ended:
            del self._open[str(each.request.request_id)]
        return ended

    def _prepare_loop(self) -> NoReturn:
        """Body of the preparing thread, which uses only `engine.prepare`, the turns and `post`."""
        _give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns.tenants)
            ended, until = [], time.monotonic() + POST_AFTER_S
            while (each := self._next()) is not None:
                self._prepare(each)
                ended.append(each)
                if time.monotonic() >= until:
                    break
            self._post(Prepared(tuple(sorted(ended, key=lambda each: each.number))))

    def _next(self) -> Preparing | None:
        with self._changed:
            return self._turns.next()

    def _prepare(self, each: Preparing) -> None:
        if each.cancelled:
            return
        try:
            each.prepared = self._engine.prepare(each.request)
        except BaseException as error:  # the loop refuses the request with it
            each.error = error
