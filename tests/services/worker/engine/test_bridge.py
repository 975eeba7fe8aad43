"""The engine process: replies and refusals, restart after an exit or a hang, and exit with its parent."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine import EngineConfig, Request, SamplingParams
from services.errors import ConfigError
from services.worker.engine.bridge import (
    LONGEST_AFTER_SERVING_S,
    RESTART_DELAYS_S,
    AdapterRefusedError,
    EngineBridge,
    EngineCallbacks,
    EngineLostError,
    EngineSpec,
    restart_delay_s,
)
from services.worker.engine.protocol import Add, Done, Finished, Load, Refused, Start, encode
from tests.builders import lora_adapter, tiny_llama
from tests.services.worker.gates import Gate
from tests.waiting import eventually

FAULTY_ENGINE = "tests.integration.stub_engine:faulty_engine"
BROKEN_ENGINE = "tests.integration.stub_engine:broken_engine"
UNSTARTABLE_ENGINE = "tests.integration.stub_engine:unstartable_engine"
GATED_ENGINE = "tests.integration.stub_engine:gated_engine"


@dataclass
class Recorder:
    """Records what the bridge reports."""

    finished: list[Finished] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    starts: int = 0

    def up(self) -> None:
        self.starts += 1

    def done(self, message: Done) -> None:
        self.finished += message.finished
        self.refused += message.refused

    @property
    def callbacks(self) -> EngineCallbacks:
        return EngineCallbacks(self.up, self.done, self.losses.append)


@asynccontextmanager
async def bridge(spec: EngineSpec, recorder: Recorder) -> AsyncIterator[EngineBridge]:
    made = EngineBridge(spec, recorder.callbacks)
    running = asyncio.create_task(made.run())
    try:
        await eventually(lambda: made.ready or running.done(), what="the engine to start")
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def spec(factory: str = FAULTY_ENGINE, silence_s: float = 60.0) -> EngineSpec:
    return EngineSpec(EngineConfig(model="none"), factory, silence_s=silence_s)


def request(request_id: str, prompt: str, adapter: str | None = None) -> Request:
    return Request(request_id=request_id, prompt=prompt, adapter=adapter, sampling=SamplingParams(max_tokens=3))


async def test_requests_are_answered_and_refusals_have_a_reason() -> None:
    recorder = Recorder()
    async with bridge(spec(), recorder) as engine:
        engine.add(
            [
                request("1", "hello"),
                request("2", "refuse"),
                request("3", "hello", adapter="unknown"),
                request("4", "fail"),
            ]
        )
        await eventually(lambda: len(recorder.finished) + len(recorder.refused) == 4)
    [finished] = recorder.finished
    assert (finished.request_id, finished.text, finished.completion_tokens) == ("1", "hel", 3)
    assert 0 < finished.added_ns <= finished.finished_ns
    assert {each.request_id: each.why for each in recorder.refused} == {
        "2": "invalid_request",
        "3": "unknown_adapter",
        "4": "failed",
    }


async def test_a_killed_engine_is_reported_once_and_replaced() -> None:
    recorder = Recorder()
    async with bridge(spec(), recorder) as engine:
        engine.add([request("1", "die")])
        await eventually(lambda: recorder.starts == 2, what="another engine")
        engine.add([request("2", "hello")])
        await eventually(lambda: recorder.finished)
    assert recorder.losses[0] == "it was killed by SIGKILL (out of memory?)"
    assert [each.request_id for each in recorder.finished] == ["2"]


async def test_an_unexpected_engine_error_is_reported() -> None:
    recorder = Recorder()
    async with bridge(spec(), recorder) as engine:
        engine.add([request("1", "crash")])
        await eventually(lambda: recorder.losses)
    assert recorder.losses[0] == "ZeroDivisionError: a defect of the engine"


async def test_a_silent_engine_is_killed() -> None:
    recorder = Recorder()
    async with bridge(spec(silence_s=2.5), recorder) as engine:
        engine.add([request("1", "hang")])
        await eventually(lambda: recorder.losses, what="the silence to be noticed")
        assert recorder.losses[0] == "it sent nothing for 2.5 s and was killed"
        with pytest.raises(EngineLostError, match="not ready"):
            engine.add([request("2", "hello")])


async def test_the_real_engine_loads_good_adapters_and_reports_errors_of_others(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    good = lora_adapter(tmp_path / "good", base, rank=4)
    broken = lora_adapter(tmp_path / "broken", base, rank=4)
    (broken / "adapter_model.safetensors").write_bytes(b"nonsense")
    recorder = Recorder()
    real = EngineSpec(EngineConfig(model=base, dtype="float32", threads=1))
    async with bridge(real, recorder) as engine:
        assert await engine.load("good", good) > 0
        with pytest.raises(AdapterRefusedError, match=r"adapter_model\.safetensors"):
            await engine.load("broken", broken)
        engine.add([request("1", "hello", adapter="good"), request("2", "hello", adapter="broken")])
        await eventually(lambda: len(recorder.finished) + len(recorder.refused) == 2)
        engine.unload("good")
        engine.add([request("3", "hello", adapter="good")])
        await eventually(lambda: len(recorder.refused) == 2)
    assert [each.request_id for each in recorder.finished] == ["1"]
    assert {each.why for each in recorder.refused} == {"unknown_adapter"}


async def test_the_real_engine_continues_to_step_during_a_check(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    loaded = lora_adapter(tmp_path / "loaded", base, rank=4)
    slow = lora_adapter(tmp_path / "slow", base, rank=4, seed=1)
    gate = Gate(slow)
    recorder = Recorder()
    real = EngineSpec(EngineConfig(model=base, dtype="float32", threads=1), GATED_ENGINE)
    async with bridge(real, recorder) as engine:
        await engine.load("loaded", loaded)
        loading = asyncio.create_task(engine.load("slow", slow))
        await eventually(gate.is_reached, what="the check to begin")
        engine.add([request("1", "hello"), request("2", "hello", adapter="loaded")])
        await eventually(lambda: len(recorder.finished) == 2, what="two jobs to finish during the check")
        assert not loading.done()
        gate.open()
        assert await loading > 0
        engine.add([request("3", "hello", adapter="slow")])
        await eventually(lambda: len(recorder.finished) == 3)
    assert {each.request_id for each in recorder.finished} == {"1", "2", "3"}
    assert not recorder.refused


async def test_an_unexpected_error_of_a_check_is_an_engine_failure(tmp_path: Path) -> None:
    adapter = lora_adapter(tmp_path / "adapter", tiny_llama(tmp_path / "base"), rank=4)
    (adapter / "defect").touch()
    recorder = Recorder()
    async with bridge(spec(), recorder) as engine:
        with pytest.raises(EngineLostError):
            await engine.load("adapter", adapter)
        await eventually(lambda: recorder.losses)
    assert recorder.losses[0] == "ZeroDivisionError: a defect of the check"


async def test_the_process_exits_during_a_check(tmp_path: Path) -> None:
    adapter = lora_adapter(tmp_path / "adapter", tiny_llama(tmp_path / "base"), rank=4)
    gate = Gate(adapter)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = (sys.executable, "-m", "services.worker.engine.process", str(theirs.fileno()))
        process = await asyncio.create_subprocess_exec(
            *arguments, pass_fds=(theirs.fileno(),), stderr=asyncio.subprocess.PIPE
        )
        ours.sendall(encode(Start(FAULTY_ENGINE, EngineConfig(model="none"))) + encode(Load("adapter", adapter)))
        await eventually(gate.is_reached, what="the check to begin")
        ours.sendall(encode(Add((request("1", "crash"),))))
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"ZeroDivisionError: a defect of the engine" in stderr


async def test_a_load_interrupted_by_an_engine_exit_is_lost_not_failed(tmp_path: Path) -> None:
    adapter = lora_adapter(tmp_path / "adapter", tiny_llama(tmp_path / "base"), rank=4)
    (adapter / "die").touch()
    async with bridge(spec(), Recorder()) as engine:
        with pytest.raises(EngineLostError):
            await engine.load("adapter", adapter)


async def test_an_engine_that_cannot_start_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="the engine cannot start: the model none cannot be used"):
        await EngineBridge(spec(BROKEN_ENGINE), Recorder().callbacks).run()


async def test_an_engine_that_was_never_ready_is_given_up() -> None:
    recorder = Recorder()
    with pytest.raises(ConfigError, match=r"did not start in 3 attempts; .*no device of this kind"):
        await EngineBridge(spec(UNSTARTABLE_ENGINE), recorder.callbacks).run()


PARENT = """
import asyncio
from engine import EngineConfig
from services.worker.engine.bridge import EngineBridge, EngineSpec, EngineCallbacks

async def main():
    up = lambda: print(bridge.pid, flush=True)
    bridge = EngineBridge(EngineSpec(EngineConfig(model="none"), "{factory}"), EngineCallbacks(up, print, print))
    await bridge.run()

asyncio.run(main())
"""


async def test_the_engine_dies_with_its_parent() -> None:
    program = PARENT.format(factory=FAULTY_ENGINE)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    engine_pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_running(engine_pid), what="the engine to end")


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_engine_that_has_served_restarts_sooner_than_one_that_has_not() -> None:
    served = [restart_delay_s(failures, has_served=True) for failures in range(8)]
    unserved = [restart_delay_s(failures, has_served=False) for failures in range(8)]
    assert max(served) == LONGEST_AFTER_SERVING_S
    assert unserved == sorted(unserved)
    assert unserved[-1] == RESTART_DELAYS_S[-1]
