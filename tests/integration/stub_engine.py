"""Engines with faults on demand, selected by a prompt or a file in an adapter's directory."""

import contextlib
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

from engine import AdapterInfo, EngineConfig, EngineError, InvalidRequestError, Output, Request
from services.worker.engine.echo import EchoEngine

STEP_S = 0.01


class Panic(BaseException):
    """What a library that is not written in Python raises: no Exception."""


class FaultyEngine(EchoEngine):
    """Prompts: `die` kills the process as if out of memory, `hang` blocks it, `crash` raises an unexpected error,
    `fail` an engine error, `refuse` rejects the request, and `wait` never ends; `panic`, `trip` and `stumble` raise
    when the request is prepared or added. A check blocks at an adapter's `gate`, the preparation of `gate PATH` at that
    of a directory; files `die` and `defect` make a check do the same.
    """

    def step(self) -> list[Output]:
        time.sleep(STEP_S)
        prompts = {request.prompt for request in self.waiting}
        if "die" in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in prompts:
            time.sleep(3600)
        if "crash" in prompts:
            raise ZeroDivisionError("a defect of the engine")
        endless = [request for request in self.waiting if request.prompt == "wait"]
        self.waiting = deque(request for request in self.waiting if request.prompt != "wait")
        finished = super().step()
        self.waiting.extend(endless)
        return finished

    def prepare(self, request: Request) -> Request:
        prompt = request.prompt or ""
        if prompt.startswith("gate "):
            pass_gate(Path(prompt.removeprefix("gate ")))
        if prompt == "refuse":
            raise InvalidRequestError("the prompt cannot be used")
        if prompt == "panic":
            raise Panic("a defect below Python")
        if prompt == "trip":
            raise ZeroDivisionError("a defect of a chat template")
        return super().prepare(request)

    def add_prepared(self, request: Request) -> str:
        if request.prompt == "fail":
            raise EngineError("the engine cannot do this one")
        if request.prompt == "stumble":
            raise LookupError("a defect of the engine")
        return super().add_prepared(request)

    def check_adapter(self, peft_dir: Path) -> AdapterInfo:
        pass_gate(peft_dir)
        if (peft_dir / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (peft_dir / "defect").exists():
            raise ZeroDivisionError("a defect of the check")
        return super().check_adapter(peft_dir)


def pass_gate(peft_dir: Path) -> None:
    """Block at a FIFO, if there is one, until the test opens it."""
    with contextlib.suppress(FileNotFoundError):
        (peft_dir / "gate").read_bytes()


def faulty_engine(config: EngineConfig) -> FaultyEngine:
    return FaultyEngine(config)


def broken_engine(config: EngineConfig) -> FaultyEngine:
    raise EngineError(f"the model {config.model} cannot be used")


def unstartable_engine(config: EngineConfig) -> FaultyEngine:
    raise RuntimeError("no device of this kind")


def gated_engine(config: EngineConfig) -> Any:
    """The real engine, whose checks block at gates."""
    from engine import CheckedAdapter, Engine  # imports torch

    class GatedEngine(Engine):
        def check_adapter(self, peft_dir: Path | str) -> CheckedAdapter:
            pass_gate(Path(peft_dir))
            return super().check_adapter(peft_dir)

    return GatedEngine(config)
