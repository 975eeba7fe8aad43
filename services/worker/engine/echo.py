"""An engine that returns each prompt as its output: a worker without a model, for benchmarks and tests."""

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine import (
    AdapterInfo,
    EngineConfig,
    FinishReason,
    Output,
    Request,
    StepStats,
    UnknownAdapterError,
    Usage,
    adapter_digest,
)


@dataclass
class EchoEngine:
    """Implements the engine's interface; each step finishes up to `max_batch_size` requests."""

    config: EngineConfig
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    loading_adapters: frozenset[str] = frozenset()
    stats: StepStats = field(default_factory=StepStats)

    @property
    def resident_adapters(self) -> Set[str]:
        """Adapters whose files were read."""
        return self.adapters.keys()

    def expect(self, adapters: Iterable[str]) -> None:
        """Nothing is evicted, so nothing has to be kept."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits."""
        return bool(self.waiting)

    def check_adapter(self, peft_dir: Path) -> AdapterInfo:
        """Read and hash the files, without parsing them."""
        num_bytes = sum(path.stat().st_size for path in peft_dir.iterdir())
        return AdapterInfo(peft_dir.name, adapter_digest(peft_dir), 1, (), num_bytes, None)

    def admit_adapter(self, name: str, checked: AdapterInfo) -> AdapterInfo:
        """Mark the adapter as loaded."""
        self.adapters[name] = info = replace(checked, name=name)
        return info

    def unload_adapter(self, name: str) -> None:
        """Remove the adapter."""
        self.adapters.pop(name, None)

    def prepare(self, request: Request) -> Request:
        """There is nothing to render or to tokenize."""
        return request

    def add_prepared(self, request: Request) -> str:
        """Queue a request; raises UnknownAdapterError."""
        if request.adapter is not None and request.adapter not in self.adapters:
            raise UnknownAdapterError(f"adapter {request.adapter!r} is not loaded")
        assert request.request_id is not None
        self.waiting.append(request)
        return request.request_id

    def cancel(self, request_id: str) -> bool:
        """Remove a waiting request."""
        before = len(self.waiting)
        self.waiting = deque(request for request in self.waiting if request.request_id != request_id)
        return len(self.waiting) < before

    def step(self) -> list[Output]:
        """Finish one batch."""
        count = min(len(self.waiting), self.config.max_batch_size)
        return [self._echo(self.waiting.popleft()) for _ in range(count)]

    def _echo(self, request: Request) -> Output:
        assert request.request_id is not None
        text = request.prompt or " ".join(message["content"] for message in request.messages or ())
        tokens = tuple(request.prompt_token_ids or text.encode())
        answer = tokens[: request.sampling.max_tokens]
        usage = Usage(len(tokens), 0, len(answer))
        reason: FinishReason = "stop" if len(answer) == len(tokens) else "length"
        return Output(request.request_id, answer, text[: len(answer)], reason, usage, first_token_s=0.0)


def echo_engine(config: EngineConfig) -> EchoEngine:
    """Factory for `loraq worker --engine echo`."""
    return EchoEngine(config)
