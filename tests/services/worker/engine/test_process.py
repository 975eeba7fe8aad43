"""The engine loop: loads do not block steps, and messages during an adapter check are handled in order."""

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
    Cancel,
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
    """The engine loop with its end of the socket pair; the test is the parent and runs each turn."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        ours.setblocking(False)
        self._ours = ours
        self._channel = Channel(theirs)
        self.engine = FaultyEngine(EngineConfig(model="none"))
        self._loop = EngineLoop(self.engine, self._channel)
        self.messages: list[FromEngine] = []

    def send(self, *messages: ToEngine) -> None:
        """Pass messages to the loop and run one turn, or as many as it takes to prepare requests."""
        self.pass_on(*messages)
        if any(isinstance(message, Add) for message in messages):
            self.settle()

    def pass_on(self, *messages: ToEngine) -> None:
        """Pass messages to the loop and run one turn."""
        for message in messages:
            self._channel.inbox.put(message)
        self.turn()

    def settle(self) -> None:
        """Run turns until no request is being prepared."""
        while len(self._loop._inputs):
            self.turn()

    def turn(self) -> None:
        """Run one turn and collect the messages that it sent."""
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
            self.messages.append(message)  # type: ignore[arg-type]  # an engine sends nothing else

    def answers(self) -> list[FromEngine]:
        """The replies to loads."""
        return [message for message in self.messages if isinstance(message, Loaded | LoadFailed)]

    def turn_until_answers(self, count: int) -> list[FromEngine]:
        """Run turns until that many loads have been answered; an idle turn ends when a check ends."""
        while len(self.answers()) < count:
            self.turn()
        return self.answers()

    def refusals(self) -> dict[str, str]:
        """Why requests were refused."""
        done = [message for message in self.messages if isinstance(message, Done)]
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


def add(request_id: str, prompt: str = "hello", adapter: str | None = None) -> Add:
    sampling = SamplingParams(max_tokens=3)
    return Add((Request(request_id=request_id, prompt=prompt, adapter=adapter, sampling=sampling),))


def test_steps_and_heartbeats_continue_during_a_check(
    loop: Loop, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.0)
    gate = Gate(adapter)
    loop.send(Load(DIGEST, adapter), add("1", "wait"))
    eventually_sync(gate.is_reached, what="the check to begin")
    loop.send(add("2"), add("3", adapter=DIGEST))
    loop.turn()
    finished = [each.request_id for message in loop.messages if isinstance(message, Done) for each in message.finished]
    assert finished == ["2"]
    assert loop.refusals() == {"3": "unknown_adapter"}
    steps = [message.num_steps for message in loop.messages if isinstance(message, Heartbeat)]
    assert steps == sorted(steps)
    assert steps[-1] >= 2
    assert not loop.answers()
    gate.open()
    loop.turn_until_answers(1)
    loop.send(add("4", adapter=DIGEST))
    assert [message.finished[0].request_id for message in loop.messages[-1:] if isinstance(message, Done)] == ["4"]


def test_an_idle_loop_wakes_when_a_check_ends(loop: Loop, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 3600.0)
    gate = Gate(adapter)
    loop.send(Load(DIGEST, adapter))
    eventually_sync(gate.is_reached, what="the check to begin")
    gate.open()
    loop.turn()
    assert loop.answers() == [Loaded(DIGEST, loop.engine.adapters[DIGEST].num_bytes)]


def test_loads_finish_in_order(loop: Loop, adapter: Path, other: Path) -> None:
    gate = Gate(adapter)
    loop.send(Load("first", adapter), Load("second", other))
    eventually_sync(gate.is_reached, what="the first check to begin")
    loop.send(add("1"))
    assert not loop.answers()
    gate.open()
    assert [getattr(answer, "digest", None) for answer in loop.turn_until_answers(2)] == ["first", "second"]


def test_an_unload_during_a_check_follows_the_load(loop: Loop, adapter: Path) -> None:
    gate = Gate(adapter)
    loop.send(Load(DIGEST, adapter), Unload(DIGEST))
    eventually_sync(gate.is_reached, what="the check to begin")
    gate.open()
    assert [type(answer) for answer in loop.turn_until_answers(1)] == [Loaded]
    loop.send(add("1", adapter=DIGEST))
    assert loop.refusals() == {"1": "unknown_adapter"}
    assert not loop.engine.adapters


def test_an_unload_of_another_adapter_does_not_wait_for_a_check(loop: Loop, adapter: Path, other: Path) -> None:
    loop.send(Load("other", other))
    loop.turn_until_answers(1)
    gate = Gate(adapter)
    loop.send(Load(DIGEST, adapter))
    eventually_sync(gate.is_reached, what="the check to begin")
    loop.send(Unload("other"), add("1", adapter="other"))
    assert loop.refusals() == {"1": "unknown_adapter"}
    gate.open()
    loop.turn_until_answers(2)
    assert set(loop.engine.adapters) == {DIGEST}


def test_an_unload_of_an_arriving_adapter_blocks_nothing(loop: Loop, adapter: Path, other: Path) -> None:
    """It takes effect once the adapter has arrived, followed by later messages for it."""
    loop.send(Load(DIGEST, adapter))
    loop.turn_until_answers(1)
    loop.engine.loading_adapters = frozenset({DIGEST})
    loop.send(Unload(DIGEST), Load(DIGEST, other), add("1"))
    loop.turn()
    finished = [each.request_id for message in loop.messages if isinstance(message, Done) for each in message.finished]
    assert finished == ["1"]
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(adapter).digest
    loop.engine.loading_adapters = frozenset()
    loop.turn_until_answers(2)
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(other).digest


def test_loads_and_unloads_of_one_adapter_take_effect_in_order(loop: Loop, adapter: Path, other: Path) -> None:
    gate = Gate(adapter)
    loop.send(Load(DIGEST, adapter), Load(DIGEST, adapter), Unload(DIGEST), Load(DIGEST, other), Unload("never seen"))
    eventually_sync(gate.is_reached, what="the first check to begin")
    gate.open()
    assert [type(answer) for answer in loop.turn_until_answers(3)] == [Loaded] * 3
    assert loop.engine.adapters[DIGEST].digest == loop.engine.check_adapter(other).digest


@pytest.mark.parametrize(("made", "reason"), [(True, "adapter_config.json does not exist"), (False, "No such file")])
def test_a_failed_load_is_answered_with_its_reason(
    loop: Loop, tmp_path: Path, adapter: Path, made: bool, reason: str
) -> None:
    if made:
        (tmp_path / "absent").mkdir()
    loop.send(Load("absent", tmp_path / "absent"), Load(DIGEST, adapter))
    failed, loaded = loop.turn_until_answers(2)
    assert isinstance(failed, LoadFailed)
    assert failed.digest == "absent"
    assert reason in failed.reason
    assert isinstance(loaded, Loaded)


def test_an_unexpected_error_of_a_check_ends_the_loop(loop: Loop, adapter: Path) -> None:
    (adapter / "defect").touch()
    with pytest.raises(ZeroDivisionError, match="a defect of the check"):  # noqa: PT012  # one of the turns raises it
        loop.send(Load(DIGEST, adapter))
        loop.turn_until_answers(1)
    assert not loop.answers()


def finished_ids(loop: Loop) -> list[str]:
    return [each.request_id for message in loop.messages if isinstance(message, Done) for each in message.finished]


def gated(tmp_path: Path, name: str) -> tuple[Gate, str]:
    """A gate, and the prompt whose preparation blocks at it."""
    directory = tmp_path / name
    directory.mkdir()
    return Gate(directory), f"gate {directory}"


def ask(request_id: str, prompt: str, tenant: str) -> Request:
    return Request(request_id=request_id, prompt=prompt, tenant=tenant, sampling=SamplingParams(max_tokens=3))


def turn_until(loop: Loop, count: int) -> list[str]:
    while len(finished_ids(loop)) < count:
        loop.turn()
    return finished_ids(loop)


def test_steps_and_heartbeats_go_on_while_a_request_is_prepared(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.0)
    gate, prompt = gated(tmp_path, "first")
    loop.send(add("1", "wait"))
    loop.pass_on(Add((ask("2", prompt, "a"), ask("3", "hello", "a"))))
    eventually_sync(gate.is_reached, what="the preparation to begin")
    for _ in range(3):
        loop.turn()
    beats = [message for message in loop.messages if isinstance(message, Heartbeat)]
    assert beats[-1].num_steps - beats[-3].num_steps == 2
    assert beats[-1].preparing == 2
    assert beats[-1].oldest_preparing_s > beats[-2].oldest_preparing_s > 0
    assert not finished_ids(loop)
    gate.open()
    assert turn_until(loop, 2) == ["2", "3"]
    loop.turn()
    beats = [message for message in loop.messages if isinstance(message, Heartbeat)]
    assert (beats[-1].preparing, beats[-1].oldest_preparing_s, beats[-1].num_prepared) == (0, 0.0, 3)


def test_tenants_take_turns_in_preparation(loop: Loop, tmp_path: Path) -> None:
    """Whoever has one request waits for one of another tenant's many, small before large where they are one's own."""
    order: list[str] = []
    prepare = loop.engine.prepare

    def noting(request: Request) -> Request:
        order.append(str(request.request_id))
        return prepare(request)

    loop.engine.prepare = noting  # type: ignore[method-assign]
    gate, prompt = gated(tmp_path, "first")
    loop.pass_on(Add((ask("first", prompt, "flood"),)))
    eventually_sync(gate.is_reached, what="the preparation to begin")
    large = "x" * 200_000
    flood = [ask(f"large {index}", large, "flood") for index in range(4)]
    loop.pass_on(Add((*flood, ask("small", "x", "flood"), ask("other", large, "one"), ask("other 2", "x", "two"))))
    gate.open()
    turn_until(loop, 8)
    assert order == [
        "first", "small", "other", "other 2", "large 0", "large 1", "large 2", "large 3",
    ]  # fmt: skip


def test_a_request_that_is_being_prepared_can_be_cancelled(loop: Loop, tmp_path: Path) -> None:
    gate, prompt = gated(tmp_path, "first")
    loop.pass_on(Add((ask("1", prompt, "a"), ask("2", "refuse", "a"), ask("3", "hello", "a"))))
    eventually_sync(gate.is_reached, what="the preparation to begin")
    loop.pass_on(Cancel(("1", "2", "never seen")))
    loop.pass_on(Add((ask("4", "hello", "a"),)))
    gate.open()
    assert turn_until(loop, 2) == ["3", "4"]
    assert not loop.refusals()
    assert not loop.engine.waiting
    assert not loop._loop._added_ns


def test_an_id_may_be_used_again_once_its_request_was_cancelled(loop: Loop, tmp_path: Path) -> None:
    gate, prompt = gated(tmp_path, "first")
    loop.pass_on(Add((ask("1", prompt, "a"),)))
    eventually_sync(gate.is_reached, what="the preparation to begin")
    loop.pass_on(Cancel(("1",)), Add((ask("1", "hello", "a"),)))
    gate.open()
    assert turn_until(loop, 1) == ["1"]
    loop.turn()
    assert finished_ids(loop) == ["1"]
    (done,) = [message for message in loop.messages if isinstance(message, Done)]
    assert done.finished[0].text == "hel"


@pytest.mark.parametrize(
    ("prompt", "why", "reason"),
    [
        ("refuse", "invalid_request", "the prompt cannot be used"),
        ("trip", "failed", "ZeroDivisionError: a defect of a chat template"),
        ("panic", "failed", "Panic: a defect below Python"),
        ("fail", "failed", "the engine cannot do this one"),
        ("stumble", "failed", "LookupError: a defect of the engine"),
    ],
)
def test_whatever_a_request_raises_ends_that_request_alone(loop: Loop, prompt: str, why: str, reason: str) -> None:
    loop.send(add("before"), Add((ask("bad", prompt, "a"),)), add("after"))
    assert sorted(turn_until(loop, 2)) == ["after", "before"]
    (refused,) = [each for message in loop.messages if isinstance(message, Done) for each in message.refused]
    assert (refused.request_id, refused.why, refused.reason) == ("bad", why, reason)
    loop.send(add("later"))
    assert turn_until(loop, 3)[-1] == "later"


def test_an_out_of_memory_error_names_the_setting() -> None:
    config = EngineConfig(model="none", pool_bytes=2**30)
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert "1073741824 bytes (LORAQ_POOL_BYTES)" in engine_process.temporary_error(error, config)
    assert (
        engine_process.temporary_error(OSError(errno.EIO, "Input/output error"), config)
        == "OSError: [Errno 5] Input/output error"
    )
