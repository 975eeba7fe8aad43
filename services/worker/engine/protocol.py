"""What the worker and its engine process say to each other: pickled frames on a socket pair.

A frame is its length (4 bytes, big-endian) and that many bytes. Both ends are the same code on the same machine.
"""

import pickle
import struct
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from engine import EngineConfig, Request

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

Refusal: TypeAlias = Literal["prompt_too_long", "unknown_adapter", "invalid_request", "failed"]


@dataclass(frozen=True, slots=True)
class Start:
    """First frame: make the engine. `factory` is `module:function` taking an EngineConfig."""

    factory: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Load the adapter of that digest from a directory, which must stay; steps go on meanwhile."""

    digest: str
    path: Path


@dataclass(frozen=True, slots=True)
class Unload:
    """Drop an adapter that no request uses."""

    digest: str


@dataclass(frozen=True, slots=True)
class Add:
    """Run these requests; each has a `request_id`. They travel as plain tuples, which costs a tenth of objects."""

    requests: tuple[Request, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_add, ([_request_fields(request) for request in self.requests],)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop these requests; nothing more is said about them."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up."""

    pid: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The adapter serves from now on; it takes `num_bytes` of the engine's pool while it is there."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The adapter cannot be served; `reason` names the file, tensor or field."""

    digest: str
    reason: str


class Finished(NamedTuple):
    """One request ran to its end. `*_ns` are wall-clock nanoseconds since 1970, for spans only."""

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
    """One request cannot be served, or failed on the way."""

    request_id: str
    why: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """What one step brought."""

    finished: tuple[Finished, ...]
    refused: tuple[Refused, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_done, ([tuple(finished) for finished in self.finished], self.refused)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The loop turns: sent at least once a second unless a step takes longer."""

    num_steps: int


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine cannot go on; the process ends after this."""

    reason: str
    permanent: bool


ToEngine: TypeAlias = Start | Load | Unload | Add | Cancel
FromEngine: TypeAlias = Ready | Loaded | LoadFailed | Done | Heartbeat | Fatal


_request_fields = attrgetter(*(each.name for each in fields(Request)))
_REQUEST_NAMES = tuple(each.name for each in fields(Request))


def _unpack_add(requests: list[tuple[Any, ...]]) -> Add:
    return Add(tuple(Request(**dict(zip(_REQUEST_NAMES, values, strict=True))) for values in requests))


def _unpack_done(finished: list[tuple[Any, ...]], refused: tuple[Refused, ...]) -> Done:
    return Done(tuple(map(Finished._make, finished)), refused)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(body) <= MAX_FRAME_BYTES, "a frame holds at most one batch, whose parts are bounded"
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> ToEngine | FromEngine:
    """The message of a frame's body."""
    message: ToEngine | FromEngine = pickle.loads(body)  # noqa: S301  # from our own child or parent, over a private pair
    return message
