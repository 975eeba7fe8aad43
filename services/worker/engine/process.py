"""The engine process: receives requests, sends results, and exits as soon as its parent exits.

python -m services.worker.engine.process FD        FD is its end of the socket pair
"""

import ctypes
import errno
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from engine import (
    EngineConfig,
    EngineError,
    InvalidRequestError,
    Output,
    PromptTooLongError,
    UnknownAdapterError,
)
from services.worker.engine.adapters import Checked, EngineAdapters
from services.worker.engine.inputs import EngineInputs, Prepared, Preparing
from services.worker.engine.protocol import (
    HEADER,
    Add,
    Cancel,
    Done,
    Expect,
    Fatal,
    Finished,
    FromEngine,
    Heartbeat,
    Load,
    Ready,
    Refusal,
    Refused,
    Start,
    Status,
    ToEngine,
    Unload,
    decode,
    encode,
)

HEARTBEAT_S = 1.0
ARRIVAL_POLL_S = 0.02
SWITCH_S = 0.0005
"""How long a thread may hold the interpreter while another wants it; a step asks for it some hundred times."""
PR_SET_PDEATHSIG = 1
REAL_ENGINE = "services.worker.engine.process:real_engine"

REFUSALS: tuple[tuple[type[EngineError], Refusal], ...] = (
    (PromptTooLongError, "prompt_too_long"),
    (UnknownAdapterError, "unknown_adapter"),
    (InvalidRequestError, "invalid_request"),
)


def real_engine(config: EngineConfig) -> Any:
    """Create the engine and warm it up; imports torch."""
    from engine import Engine

    engine = Engine(config)
    engine.warm_up()
    return engine


def refusal_of(error: BaseException) -> Refusal:
    """The refusal code for what a request raised; an error that nobody expected is a failure of that request."""
    return next((why for kind, why in REFUSALS if isinstance(error, kind)), "failed")


class Channel:
    """The process's end of the socket pair: a thread reads into `inbox`, the loop writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.inbox: queue.SimpleQueue[ToEngine | Checked | Prepared] = queue.SimpleQueue()

    def receive(self) -> ToEngine:
        """Wait for the next message; exits the process if the parent has exited."""
        try:
            (length,) = HEADER.unpack(self._read(HEADER.size))
            return decode(self._read(length))  # type: ignore[return-value]  # the parent sends nothing else
        except (EOFError, OSError):
            os._exit(0)

    def _read(self, size: int) -> bytes:
        body = bytearray(size)
        view = memoryview(body)
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return bytes(body)

    def read_loop(self) -> NoReturn:
        """Body of the reading thread."""
        while True:
            self.inbox.put(self.receive())

    def send(self, message: FromEngine) -> None:
        """Send a message, blocking while the socket is full; exits the process if the parent has exited."""
        try:
            self._sock.sendall(encode(message))
        except OSError:
            os._exit(0)


class EngineLoop:
    """Translates messages to engine calls and engine outputs to messages."""

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._adapters = EngineAdapters(engine, channel.inbox.put, channel.send)
        self._inputs = EngineInputs(engine, channel.inbox.put)
        self._added_ns: dict[str, int] = {}
        self._num_steps = 0
        self._beat_at = 0.0
        self._resident: frozenset[str] = frozenset()

    def run(self) -> NoReturn:
        """Serve until the parent exits."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Handle messages, waiting for one only if there is no work, and run one step."""
        self._beat()
        self._drain_inbox()
        if self._engine.has_work or self._adapters.awaits_arrivals:
            self._report(self._engine.step(), [])
            self._num_steps += 1
            self._send_status(only_changes=True)
            self._adapters.unload_arrived()

    def _beat(self) -> None:
        if (now := time.monotonic()) - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._channel.send(self._heartbeat(now))
            self._send_status(only_changes=False)

    def _heartbeat(self, now: float) -> Heartbeat:
        inputs = self._inputs
        return Heartbeat(self._num_steps, len(inputs), inputs.oldest_s(now), inputs.num_prepared)

    def _send_status(self, *, only_changes: bool) -> None:
        resident = frozenset(self._engine.resident_adapters)
        if resident != self._resident or not only_changes:
            self._resident = resident
            self._channel.send(Status(self._engine.stats, resident))

    def _drain_inbox(self) -> None:
        idle_s = ARRIVAL_POLL_S if self._adapters.awaits_arrivals else HEARTBEAT_S
        wait_s = 0.0 if self._engine.has_work else idle_s
        try:
            self._handle(self._channel.inbox.get(timeout=wait_s) if wait_s else self._channel.inbox.get_nowait())
            while True:
                self._handle(self._channel.inbox.get_nowait())
        except queue.Empty:
            return

    def _handle(self, message: ToEngine | Checked | Prepared) -> None:
        match message:
            case Add(requests):
                now_ns = time.time_ns()
                self._added_ns.update((str(request.request_id), now_ns) for request in requests)
                self._inputs.add(requests)
            case Prepared():
                ended = self._inputs.take(message)
                self._report([], [refused for each in ended if (refused := self._add(each))])
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._cancel(request_id)
            case Expect(digests):
                self._engine.expect(digests)
            case Load() | Unload():
                self._adapters.handle(message)
            case Checked():
                self._adapters.admit(message)
            case Start():
                raise AssertionError("the engine has already started")

    def _cancel(self, request_id: str) -> None:
        self._added_ns.pop(request_id, None)
        if not self._inputs.cancel(request_id):
            self._engine.cancel(request_id)

    def _add(self, each: Preparing) -> Refused | None:
        """Hand a prepared request to the engine. Whatever it raised so far, or raises here, ends this one alone."""
        error = each.error
        if error is None:
            try:
                self._engine.add_prepared(each.prepared)
            except Exception as raised:
                error = raised
        if error is None:
            return None
        request_id = str(each.request.request_id)
        self._added_ns.pop(request_id, None)
        return _refused(request_id, error)

    def _report(self, outputs: list[Output], refused: list[Refused]) -> None:
        finished = []
        for output in outputs:
            added_ns = self._added_ns.pop(output.request_id, 0)
            if output.error is not None:
                refused.append(_refused(output.request_id, output.error))
            else:
                finished.append(_finished(output, added_ns))
        if finished or refused:
            self._channel.send(Done(tuple(finished), tuple(refused)))


def _refused(request_id: str, error: BaseException) -> Refused:
    reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return Refused(request_id, refusal_of(error), reason)


def _finished(output: Output, added_ns: int) -> Finished:
    usage = output.usage
    return Finished(
        request_id=output.request_id,
        token_ids=tuple(output.token_ids),
        text=output.text,
        finish_reason=output.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        logprobs=output.logprobs,
        first_token_s=output.first_token_s,
        added_ns=added_ns,
        finished_ns=time.time_ns(),
    )


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent exits; end of file on the socket covers other systems and the race."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def temporary_error(error: Exception, config: EngineConfig) -> str:
    """The message for a temporary error; for lack of memory it names the setting."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        message += f"; its pages take {config.pool_bytes} bytes (LORAQ_POOL_BYTES) in addition to the base model"
    return message


def _make_engine(start: Start) -> Any:
    module, function = start.factory.split(":")
    factory: Callable[[EngineConfig], Any] = getattr(importlib.import_module(module), function)
    return factory(start.config)


def main(descriptor: int) -> None:
    """Serve the parent over the socket pair; SIGINT and SIGTERM are left to the parent."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    channel = Channel(socket.socket(fileno=descriptor))
    start = channel.receive()
    assert isinstance(start, Start)
    threading.Thread(target=channel.read_loop, name="inbox", daemon=True).start()
    try:
        engine = _make_engine(start)
        channel.send(Ready(os.getpid()))
        EngineLoop(engine, channel).run()
    except Exception as error:
        permanent = isinstance(error, EngineError)
        channel.send(Fatal(str(error) if permanent else temporary_error(error, start.config), permanent))
        if not permanent:
            raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
