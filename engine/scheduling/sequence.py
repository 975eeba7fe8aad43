"""Sequence: the mutable state of one request while it is in the engine."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from engine.memory.pool import AdapterPages, SequencePages
from engine.memory.prefix import block_key
from engine.types import AdapterName, BlockKey, PageId, RequestId, SamplingParams

NO_SCOPE = BlockKey(b"")


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens. `num_computed` of them have keys and values in `pages`.

    The first `num_shared` pages are shared blocks of the prefix cache; the sequence owns the others. `scope` is the key
    that precedes its first block. `num_cached` is the number of prompt tokens found in the prefix cache when it first
    ran. `waited_steps` counts the steps it has waited for room for its adapter. `has_yielded` is true once it was
    preempted to make room for another sequence's adapter, or displaced. If the batch is full, the sequence takes the
    place of the running one named by `displaces`.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterName | None
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    scope: BlockKey = NO_SCOPE
    adapter_num_pages: int = 0
    pages: list[PageId] = field(default_factory=list)
    num_shared: int = 0
    num_cached: int | None = None
    waited_steps: int = 0
    has_yielded: bool = False
    displaces: RequestId | None = None
    _keys: list[BlockKey] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """The most prompt and generated tokens it can have."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def owner(self) -> SequencePages:
        """Owner of its unshared pages."""
        return SequencePages(self.request_id)

    @property
    def adapter_owner(self) -> AdapterPages | None:
        """Owner of its adapter's pages."""
        return None if self.adapter is None else AdapterPages(self.adapter)

    def tokens(self, start: int, end: int) -> Many[int]:
        """Token ids of positions start to end."""
        length = len(self.prompt_ids)
        if start >= length:
            return self.output_ids[start - length : end - length]
        if end <= length:
            return self.prompt_ids[start:end]
        return [*self.prompt_ids[start:], *self.output_ids[: end - length]]

    def key(self, block: int, tokens_per_page: int) -> BlockKey:
        """Prefix cache key of a block; all of the block's tokens must be known."""
        while len(self._keys) <= block:
            start = len(self._keys) * tokens_per_page
            previous = self._keys[-1] if self._keys else self.scope
            self._keys.append(block_key(previous, self.tokens(start, start + tokens_per_page)))
        return self._keys[block]
