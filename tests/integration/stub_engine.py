"""Engines with faults on request: a prompt, or a file in an adapter's directory, says what goes wrong."""

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


class FaultyEngine(EchoEngine):
    """`die`: the process ends as if out of memory; `hang`: it never comes back; `fail`: the engine says so; `wait`: the
    request never ends. A check stands still at an adapter's `gate`, and meets a `die` or a `defect` there.
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
        forever = [request for request in self.waiting if request.prompt == "wait"]
        self.waiting = deque(request for request in self.waiting if request.prompt != "wait")
        finished = super().step()
        self.waiting.extend(forever)
        return finished

    def add(self, request: Request) -> str:
        if request.prompt == "refuse":
            raise InvalidRequestError("the prompt cannot be used")
        if request.prompt == "fail":
            raise EngineError("the engine cannot do this one")
        return super().add(request)

    def check_adapter(self, peft_dir: Path) -> AdapterInfo:
        pass_gate(peft_dir)
        if (peft_dir / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (peft_dir / "defect").exists():
            raise ZeroDivisionError("a defect of the check")
        return super().check_adapter(peft_dir)


def pass_gate(peft_dir: Path) -> None:
    """Where a FIFO stands in the way, go on when the test has opened it."""
    with contextlib.suppress(FileNotFoundError):
        (peft_dir / "gate").read_bytes()


def faulty_engine(config: EngineConfig) -> FaultyEngine:
    return FaultyEngine(config)


def broken_engine(config: EngineConfig) -> FaultyEngine:
    raise EngineError(f"the model {config.model} cannot be used")


def stillborn_engine(config: EngineConfig) -> FaultyEngine:
    raise RuntimeError("no device of this kind")


def gated_engine(config: EngineConfig) -> Any:
    """The real engine, whose checks stand still at gates."""
    from engine import CheckedAdapter, Engine  # imports torch

    class GatedEngine(Engine):
        def check_adapter(self, peft_dir: Path | str) -> CheckedAdapter:
            pass_gate(Path(peft_dir))
            return super().check_adapter(peft_dir)

    return GatedEngine(config)
