"""Loads adapters in an engine process: checks run in a thread in parallel with steps, admission between steps."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from engine import EngineError
from services.worker.engine.protocol import Load, Loaded, LoadFailed, Unload


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check: the checked `adapter` for the engine to admit, or the `error`."""

    digest: str
    adapter: Any = None
    error: BaseException | None = None


class EngineAdapters:
    """Loads and unloads adapters for the engine loop; messages for one adapter are handled in order.

    A load reads and hashes files, which a slow disk can delay, so a daemon thread does that, one load after another.
    Its queue is bounded by the parent, which waits for the reply to each load. `post` passes the thread's results to
    the loop, which calls `admit`; `send` replies to the parent. An unload of an adapter that is still arriving waits
    until the loop calls `unload_arrived`.
    """

    def __init__(
        self, engine: Any, post: Callable[[Checked], None], send: Callable[[Loaded | LoadFailed], None]
    ) -> None:
        self._engine, self._post, self._send = engine, post, send
        self._asked: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._later: dict[str, list[Load | Unload]] = {}
        self._to_unload: set[str] = set()
        threading.Thread(target=self._check_loop, name="adapter checks", daemon=True).start()

    def _check_loop(self) -> NoReturn:
        """Body of the checking thread, which uses only `check_adapter` and the two queues."""
        while True:
            load = self._asked.get()
            try:
                checked = Checked(load.digest, self._engine.check_adapter(load.path))
            except BaseException as error:  # `admit` raises it in the loop
                checked = Checked(load.digest, error=error)
            self._post(checked)

    def handle(self, message: Load | Unload) -> None:
        """Start a load, or unload immediately; messages for an adapter that is busy are queued."""
        digest = message.digest
        if (later := self._later.get(digest)) is not None:
            later.append(message)
        elif isinstance(message, Load):
            self._later[digest] = []
            self._asked.put(message)
        elif digest in self._engine.loading_adapters:
            self._later[digest] = []
            self._to_unload.add(digest)
        else:
            self._unload(digest)

    def _unload(self, digest: str) -> None:
        with contextlib.suppress(EngineError):  # harmless: a load of the same digest would replace it
            self._engine.unload_adapter(digest)

    @property
    def awaits_arrivals(self) -> bool:
        """Whether an unload waits for an adapter to arrive."""
        return bool(self._to_unload)

    def unload_arrived(self) -> None:
        """Unload the adapters that have arrived meanwhile."""
        for digest in self._to_unload - self._engine.loading_adapters:
            self._to_unload.remove(digest)
            self._unload(digest)
            self._handle_later(digest)

    def _handle_later(self, digest: str) -> None:
        for message in self._later.pop(digest):
            self.handle(message)

    def admit(self, checked: Checked) -> None:
        """Finish a load and reply to the parent. Raises an error of the check that the adapter did not cause."""
        try:
            if checked.error is not None:
                raise checked.error
            info = self._engine.admit_adapter(checked.digest, checked.adapter)
        except (EngineError, OSError) as error:
            self._send(LoadFailed(checked.digest, str(error)))
        else:
            self._send(Loaded(checked.digest, info.num_bytes))
        self._handle_later(checked.digest)
