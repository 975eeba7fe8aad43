"""Data types shared by the modules of the engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal, NewType

from engine.errors import EngineError, InvalidRequestError

RequestId = NewType("RequestId", str)
AdapterName = NewType("AdapterName", str)
PageId = NewType("PageId", int)
BlockKey = NewType("BlockKey", bytes)

FinishReason = Literal["stop", "length"]

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled; the defaults are greedy decoding of at most 128 tokens.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties 0 and `repetition_penalty` 1 are off.
    `logprobs` n reports each generated token and the n most likely ones, from the raw logits.
    Raises InvalidRequestError naming the first field that is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, math.inf)
        _check_number("temperature", self.temperature, 0, 10)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_integer("top_k", self.top_k, 0, math.inf)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 10, above=True)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"sampling.ignore_eos must be true or false, not {type(self.ignore_eos).__name__}"
            )
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequestError("sampling.stop must be a tuple of non-empty strings")
        _check_range("number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS)


def is_integer(value: object) -> bool:
    """Whether a value is an int; True and False are not meant."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(name: str, value: object, low: float, high: float) -> None:
    if not is_integer(value):
        raise InvalidRequestError(f"sampling.{name} must be a whole number, not {type(value).__name__}")
    _check_range(name, value, low, high)  # type: ignore[arg-type]  # an int by now


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not is_integer(value) and not isinstance(value, float):
        raise InvalidRequestError(f"sampling.{name} must be a number, not {type(value).__name__}")
    _check_range(name, value, low, high, above=above)  # type: ignore[arg-type]  # an int or a float by now


def _check_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if not (low < value <= high if above else low <= value <= high):
        bound = "above" if above else "at least"
        raise InvalidRequestError(f"sampling.{name} is {value}; it must be {bound} {low} and at most {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete. Exactly one of `prompt_token_ids`, `prompt` and `messages` is given.

    `messages` are rendered with the base model's chat template; the text of a control token, such as `<|im_end|>`, is
    plain text in them. In `prompt` it becomes that token, unless `allow_special_tokens` is false. `adapter` is the name
    of a loaded adapter, or None for the base model. Without a `request_id` the engine generates one. If the batch is
    full, the request takes the place of the running request whose id is `displaces`; that one continues later, and is
    displaced at most once.
    """

    request_id: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    adapter: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    displaces: str | None = None
    allow_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that `Engine.prepare` has checked, rendered and tokenized.

    `request` is the request without its prompt, `began_at` when its preparation began, monotonic seconds.
    """

    request: Request
    prompt_ids: tuple[int, ...]
    began_at: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` is the part of the prompt that came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request.

    `token_ids` are all generated tokens; `text` omits special tokens and ends before a stop string.
    `logprobs[i]` maps token ids to natural-log probabilities: generated token i and the n most likely, from raw logits.
    `first_token_s` is the time from `add` or `prepare` to the first token, in seconds. If `error` is set, the request
    failed and the other fields hold its state at that point.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[dict[int, float]] | None = None
    first_token_s: float | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Description of a checked adapter.

    `digest` is its identity (`adapter_digest`), `rank` its largest unpadded rank, `target_modules` the projections that
    it adapts, `base_model` the base model named in its configuration. `num_bytes` is the size of its weights: as stored
    while it is only checked, as pages once it is loaded.
    """

    name: str
    digest: str
    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int
    base_model: str | None


@dataclass(frozen=True, slots=True)
class AdapterTraffic:
    """Adapters read into the pool since the engine started, and the bytes of adapter pages moved in and out."""

    loads: int
    bytes_in: int
    bytes_out: int

    def __sub__(self, earlier: "AdapterTraffic") -> "AdapterTraffic":
        """The difference from an earlier count."""
        return AdapterTraffic(
            self.loads - earlier.loads, self.bytes_in - earlier.bytes_in, self.bytes_out - earlier.bytes_out
        )


@dataclass(frozen=True, slots=True)
class StepStats:
    """What steps have computed and read. `busy_s` is seconds of forward passes and sampling, `decode_only_s` and
    `decode_only_tokens` the part of steps that computed no prompt.

    `adapters` counts the distinct adapters of each step, `adapter_bytes` the bytes of their pages, which it reads.
    """

    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_only_s: float = 0.0
    decode_only_tokens: int = 0
    adapters: int = 0
    adapter_bytes: int = 0

    def __add__(self, other: "StepStats") -> "StepStats":
        return StepStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: "StepStats") -> "StepStats":
        """The counts since an earlier snapshot."""
        return StepStats(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of a row, and its log-probabilities if the request asked for them.

    `finite` is false if the row's logits contain NaN or infinity.
    """

    token_id: int
    logprobs: dict[int, float] | None
    finite: bool
