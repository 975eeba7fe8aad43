"""The adapters of an engine process: checked in a thread beside the steps, admitted between two of them."""

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
    """A check has ended: `adapter` is for the engine to admit, unless `error` is why there is none."""

    digest: str
    adapter: Any = None
    error: BaseException | None = None


class EngineAdapters:
    """Loads and unloads for the loop, each adapter's in the order in which they came.

    A load reads and hashes files, which takes as long as their disk likes, so one daemon thread does that in the order
    of the loads; it is as far behind as the parent lets it, who waits for the answer to each. `post` brings what the
    thread found to the loop, which gives it to `admit`; `send` answers the parent. An unload of an adapter whose pages
    are being filled waits for that as well, until the loop calls `unload_arrived`.
    """

    def __init__(
        self, engine: Any, post: Callable[[Checked], None], send: Callable[[Loaded | LoadFailed], None]
    ) -> None:
        self._engine, self._post, self._send = engine, post, send
        self._asked: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._later: dict[str, list[Load | Unload]] = {}
        self._to_unload: set[str] = set()
        threading.Thread(target=self._check_for_ever, name="adapter checks", daemon=True).start()

    def _check_for_ever(self) -> NoReturn:
        """Body of the checking thread, which touches nothing but `check_adapter` and the two queues."""
        while True:
            load = self._asked.get()
            try:
                checked = Checked(load.digest, self._engine.check_adapter(load.path))
            except BaseException as error:  # `admit` raises it in the loop: none ends this thread unseen
                checked = Checked(load.digest, error=error)
            self._post(checked)

    def handle(self, message: Load | Unload) -> None:
        """Begin a load, or unload at once; what comes for an adapter while it is busy waits for the end of that."""
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
        with contextlib.suppress(EngineError):  # a load of the same digest would replace it
            self._engine.unload_adapter(digest)

    @property
    def awaits_arrivals(self) -> bool:
        """Whether an unload waits for the engine's next steps."""
        return bool(self._to_unload)

    def unload_arrived(self) -> None:
        """Make up for unloads that had to wait."""
        for digest in self._to_unload - self._engine.loading_adapters:
            self._to_unload.remove(digest)
            self._unload(digest)
            self._handle_later(digest)

    def _handle_later(self, digest: str) -> None:
        for message in self._later.pop(digest):
            self.handle(message)

    def admit(self, checked: Checked) -> None:
        """End a load, and answer it. Raises what the check raised when that says nothing about the adapter."""
        try:
            if checked.error is not None:
                raise checked.error
            info = self._engine.admit_adapter(checked.digest, checked.adapter)
        except (EngineError, OSError) as error:
            self._send(LoadFailed(checked.digest, str(error)))
        else:
            self._send(Loaded(checked.digest, info.num_bytes))
        self._handle_later(checked.digest)
