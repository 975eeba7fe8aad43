"""The echo engine with faults on request: a prompt says what goes wrong."""

import os
import signal
import time
from collections import deque
from pathlib import Path

from engine import AdapterInfo, EngineConfig, EngineError, InvalidRequestError, Output, Request
from services.worker.echo import EchoEngine

STEP_S = 0.01


class FaultyEngine(EchoEngine):
    """`die`: the process ends as if out of memory; `hang`: it never comes back; `fail`: the engine says so; `wait`: the
    request never ends.
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

    def load_adapter(self, name: str, peft_dir: Path) -> AdapterInfo:
        if (peft_dir / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_adapter(name, peft_dir)


def faulty_engine(config: EngineConfig) -> FaultyEngine:
    return FaultyEngine(config)


def broken_engine(config: EngineConfig) -> FaultyEngine:
    raise EngineError(f"the model {config.model} cannot be used")


def stillborn_engine(config: EngineConfig) -> FaultyEngine:
    raise RuntimeError("no device of this kind")
