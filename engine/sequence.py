"""Sequence: the mutable state of one request while it is in the engine."""

from dataclasses import dataclass, field

from engine.types import AdapterName, RequestId, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens. `num_computed` of them have keys and values in pages."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterName | None
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens that it may grow to."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start to end."""
        length = len(self.prompt_ids)
        return [*self.prompt_ids[start:end], *self.output_ids[max(start - length, 0) : max(end - length, 0)]]
