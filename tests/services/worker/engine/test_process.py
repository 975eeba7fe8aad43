"""The engine's loop: a load holds up no step, and whatever comes while an adapter is checked ends well."""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import EngineConfig, Request, SamplingParams
from services.worker.engine import process as engine_process
from services.worker.engine.process import Channel, EngineLoop
from services.worker.engine.protocol import (
    HEADER,
    Add,
    Done,
    FromEngine,
    Heartbeat,
    Load,
    Loaded,
    LoadFailed,
    ToEngine,
    Unload,
    decode,
)
from tests.builders import lora_adapter, tiny_llama
from tests.integration.stub_engine import FaultyEngine
from tests.services.worker.gates import Gate
from tests.waiting import eventually_sync

DIGEST = "d" * 64


class Loop:
    """The loop and its end of the pair, turned by the test, which is the parent."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        ours.setblocking(False)
        self._ours = ours
        self._channel = Channel(theirs)
        self.engine = FaultyEngine(EngineConfig(model="none"))
        self._loop = EngineLoop(self.engine, self._channel)
        self.heard: list[FromEngine] = []

    def say(self, *messages: ToEngine) -> None:
        """Give the loop these and let it turn once."""
        for message in messages:
            self._channel.inbox.put(message)
        self.turn()

    def turn(self) -> None:
        """One turn; what it sent is heard."""
        self._loop.turn()
        received = b""
        try:
            while chunk := self._ours.recv(1 << 16):
                received += chunk
        except BlockingIOError:
            pass
        while received:
            (length,) = HEADER.unpack_from(received)
            message = decode(received[HEADER.size : HEADER.size + length])
            received = received[HEADER.size + length :]
            self.heard.append(message)  # type: ignore[arg-type]  # an engine sends nothing else

    def answers(self) -> list[FromEngine]:
        """What was said about loads."""
        return [message for message in self.heard if isinstance(message, Loaded | LoadFailed)]

    def turn_until_answers(self, count: int) -> list[FromEngine]:
        """Turn until that many loads have been answered; an idle turn ends when a check does."""
        while len(self.answers()) < count:
            self.turn()
        return self.answers()

    def refusals(self) -> dict[str, str]:
        """Why requests were refused."""
        done = [message for message in self.heard if isinstance(message, Done)]
        return {refused.request_id: refused.why for message in done for refused in message.refused}


@pytest.fixture
def loop() -> Iterator[Loop]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Loop(ours, theirs)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return lora_adapter(tmp_path / "adapter", tiny_llama(tmp_path / "base"), rank=4)


@pytest.fixture
def other(adapter: Path, tmp_path: Path) -> Path:
    return lora_adapter(tmp_path / "other", tmp_path / "base", rank=4, seed=1)


def ask(request_id: str, prompt: str = "hello", adapter: str | None = None) -> Add:
    sampling = SamplingParams(max_tokens=3)
    return Add((Request(request_id=request_id, prompt=prompt, adapter=adapter, sampling=sampling),))


def test_steps_and_heartbeats_go_on_while_an_adapter_is_checked(
    loop: Loop, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.0)
    gate = Gate(adapter)
    loop.say(Load(DIGEST, adapter), ask("1", "wait"))
    eventually_sync(gate.is_reached, what="the check to begin")
    loop.say(ask("2"), ask("3", adapter=DIGEST))
    loop.turn()
    finished = [each.request_id for message in loop.heard if isinstance(message, Done) for each in message.finished]
    assert finished == ["2"]
    assert loop.refusals() == {"3": "unknown_adapter"}
    assert [message.num_steps for message in loop.heard if isinstance(message, Heartbeat)] == [0, 1, 2]
    assert not loop.answers()
    gate.open()
    loop.turn_until_answers(1)
    loop.say(ask("4", adapter=DIGEST))
    assert [message.finished[0].request_id for message in loop.heard[-1:] if isinstance(message, Done)] == ["4"]


def test_an_idle_loop_wakes_when_a_check_ends(loop: Loop, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 3600.0)
    gate = Gate(adapter)
    loop.say(Load(DIGEST, adapter))
    eventually_sync(gate.is_reached, what="the check to begin")
    gate.open()
    loop.turn()
    assert loop.answers() == [Loaded(DIGEST, loop.engine.adapters[DIGEST].num_bytes)]


def test_loads_end_in_the_order_in_which_they_came(loop: Loop, adapter: Path, other: Path) -> None:
    gate = Gate(adapter)
    loop.say(Load("first", adapter), Load("second", other))
    eventually_sync(gate.is_reached, what="the first check to begin")
    loop.say(ask("1"))
    assert not loop.answers()
    gate.open()
    assert [getattr(answer, "digest", None) for answer in loop.turn_until_answers(2)] == ["first", "second"]


def test_an_unload_while_the_adapter_is_checked_comes_after_the_load(loop: Loop, adapter: Path) -> None:
    gate = Gate(adapter)
    loop.say(Load(DIGEST, adapter), Unload(DIGEST))
    eventually_sync(gate.is_reached, what="the check to begin")
    gate.open()
    assert [type(answer) for answer in loop.turn_until_answers(1)] == [Loaded]
    loop.say(ask("1", adapter=DIGEST))
    assert loop.refusals() == {"1": "unknown_adapter"}
    assert not loop.engine.adapters


def test_an_unload_of_another_adapter_waits_for_no_check(loop: Loop, adapter: Path, other: Path) -> None:
    loop.say(Load("other", other))
    loop.turn_until_answers(1)
    gate = Gate(adapter)
    loop.say(Load(DIGEST, adapter))
    eventually_sync(gate.is_reached, what="the check to begin")
    loop.say(Unload("other"), ask("1", adapter="other"))
    assert loop.refusals() == {"1": "unknown_adapter"}
    gate.open()
    loop.turn_until_answers(2)
    assert set(loop.engine.adapters) == {DIGEST}


def test_an_unload_of_an_adapter_on_its_way_stops_nobody(loop: Loop, adapter: Path, other: Path) -> None:
    """It takes effect once the adapter has arrived; what came for it meanwhile follows."""
    loop.say(Load(DIGEST, adapter))
    loop.turn_until_answers(1)
    loop.engine.loading_adapters = frozenset({DIGEST})
    loop.say(Unload(DIGEST), Load(DIGEST, other), ask("1"))
    loop.turn()
    finished = [each.request_id for message in loop.heard if isinstance(message, Done) for each in message.finished]
    assert finished == ["1"]
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(adapter).digest
    loop.engine.loading_adapters = frozenset()
    loop.turn_until_answers(2)
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(other).digest


def test_loads_and_unloads_of_one_adapter_take_effect_in_their_order(loop: Loop, adapter: Path, other: Path) -> None:
    gate = Gate(adapter)
    loop.say(Load(DIGEST, adapter), Load(DIGEST, adapter), Unload(DIGEST), Load(DIGEST, other), Unload("never seen"))
    eventually_sync(gate.is_reached, what="the first check to begin")
    gate.open()
    assert [type(answer) for answer in loop.turn_until_answers(3)] == [Loaded] * 3
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(other).digest


@pytest.mark.parametrize(("made", "reason"), [(True, "adapter_config.json does not exist"), (False, "No such file")])
def test_a_load_that_cannot_be_is_answered_with_its_reason(
    loop: Loop, tmp_path: Path, adapter: Path, made: bool, reason: str
) -> None:
    if made:
        (tmp_path / "absent").mkdir()
    loop.say(Load("absent", tmp_path / "absent"), Load(DIGEST, adapter))
    failed, loaded = loop.turn_until_answers(2)
    assert isinstance(failed, LoadFailed)
    assert failed.digest == "absent"
    assert reason in failed.reason
    assert isinstance(loaded, Loaded)


def test_a_defect_of_a_check_ends_the_loop(loop: Loop, adapter: Path) -> None:
    (adapter / "defect").touch()
    with pytest.raises(ZeroDivisionError, match="a defect of the check"):  # noqa: PT012  # one of the turns raises it
        loop.say(Load(DIGEST, adapter))
        loop.turn_until_answers(1)
    assert not loop.answers()


def test_memory_that_is_not_there_is_told_with_the_setting_that_asks_for_it() -> None:
    config = EngineConfig(model="none", pool_bytes=2**30)
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert "1073741824 bytes (LORAQ_POOL_BYTES)" in engine_process.temporary_error(error, config)
    assert (
        engine_process.temporary_error(OSError(errno.EIO, "Input/output error"), config)
        == "OSError: [Errno 5] Input/output error"
    )
