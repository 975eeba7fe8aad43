"""The protocol between the worker and its engine process: pickled frames on a socket pair.

A frame is a length (4 bytes, big-endian) followed by that many bytes. Both ends run the same code on the same machine.
"""

import pickle
import struct
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from engine import EngineConfig, Request, StepStats

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

Refusal: TypeAlias = Literal["prompt_too_long", "unknown_adapter", "invalid_request", "failed"]


@dataclass(frozen=True, slots=True)
class Start:
    """The first frame: create the engine. `factory` is `module:function` and takes an EngineConfig."""

    factory: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Load an adapter from a directory, which must remain; steps continue meanwhile."""

    digest: str
    path: Path


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload an adapter that no request uses."""

    digest: str


@dataclass(frozen=True, slots=True)
class Add:
    """Run requests, each with a `request_id`. Pickled as plain tuples, at a tenth of the cost of objects."""

    requests: tuple[Request, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_add, ([_request_fields(request) for request in self.requests],)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop requests; no message about them follows."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expect:
    """Adapters that requests not yet sent will need, the one needed first first; replaces the last list."""

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready."""

    pid: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The adapter is loaded; it takes `num_bytes` of the engine's pool while it is resident."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The adapter cannot be served; `reason` names the file, tensor or field."""

    digest: str
    reason: str


class Finished(NamedTuple):
    """The output of a finished request. `*_ns` are wall-clock nanoseconds since 1970, for spans only."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logprobs: list[dict[int, float]] | None
    first_token_s: float | None
    added_ns: int
    finished_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served or has failed."""

    request_id: str
    why: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The results of one step."""

    finished: tuple[Finished, ...]
    refused: tuple[Refused, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_done, ([tuple(finished) for finished in self.finished], self.refused)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at least once a second, unless a step takes longer.

    `preparing` requests are being prepared, the oldest for `oldest_preparing_s`; `num_prepared` counts the others.
    """

    num_steps: int
    preparing: int = 0
    oldest_preparing_s: float = 0.0
    num_prepared: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Counts of the engine's steps and the adapters in its pages; sent when these change, and every second."""

    stats: StepStats
    resident: frozenset[str]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine has failed; the process exits after this message."""

    reason: str
    permanent: bool


ToEngine: TypeAlias = Start | Load | Unload | Add | Cancel | Expect
FromEngine: TypeAlias = Ready | Loaded | LoadFailed | Done | Heartbeat | Status | Fatal


_request_fields = attrgetter(*(each.name for each in fields(Request)))
_REQUEST_NAMES = tuple(each.name for each in fields(Request))


def _unpack_add(requests: list[tuple[Any, ...]]) -> Add:
    return Add(tuple(Request(**dict(zip(_REQUEST_NAMES, values, strict=True))) for values in requests))


def _unpack_done(finished: list[tuple[Any, ...]], refused: tuple[Refused, ...]) -> Done:
    return Done(tuple(map(Finished._make, finished)), refused)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as a frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(body) <= MAX_FRAME_BYTES, "a frame holds at most one batch of bounded messages"
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> ToEngine | FromEngine:
    """Decode the body of a frame."""
    message: ToEngine | FromEngine = pickle.loads(body)  # noqa: S301  # from our own child or parent, over a private pair
    return message
