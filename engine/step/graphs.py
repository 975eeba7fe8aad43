"""Decode steps of few sizes, each recorded once and played again whatever adapters and ranks are in the batch.

Rows are padded to a bucket of the batch size, block tables to one of the context. The work lists that the kernels take
their rows from are built on the device, so a recording holds for every mix; it ends with the tables' and buffers'
addresses, or when an adapter comes whose rank is beyond what the kernels were told.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.device import Device
from engine.model.batch import StepBatch
from engine.step.placement import Sizes

Memory = tuple[int, ...]
"""Of all that a recording reads or writes, how often something larger took its place, or the bound of what it holds."""

SMALL_BUCKETS = (1, 2, 4)
BUCKET_STEP = 8
FEWEST_BLOCKS = 16
"""Programs of the attention that find no keys cost less than a recording for each length of short contexts."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a recording depends on beside memory. `num_segments` 0 is the base model alone, 1 one adapter alone."""

    sizes: Sizes
    num_segments: int


@dataclass(frozen=True, slots=True)
class _Recording:
    """`logits` are where the replayed work leaves them."""

    replay: Callable[[], None]
    logits: Tensor


def batch_buckets(most: int) -> list[int]:
    """All numbers of rows that decode steps are padded to, smallest first."""
    return sorted({batch_bucket(sequences, most) for sequences in range(1, most + 1)})


def batch_bucket(sequences: int, most: int) -> int:
    """The number of rows that a decode step of so many sequences is padded to."""
    small = next((size for size in SMALL_BUCKETS if sequences <= size), None)
    return min(small or -(-sequences // BUCKET_STEP) * BUCKET_STEP, most)


def block_bucket(blocks: int) -> int:
    """The length that block tables are padded to."""
    return max(FEWEST_BLOCKS, 1 << (blocks - 1).bit_length())


def sizes_for(batch: StepBatch, max_batch_size: int) -> Sizes | None:
    """What to pad a step to; None when it is no decode step, or reaches beyond the layers: then it is not recorded."""
    attention = batch.attention
    sequences = len(attention.context_lens)
    if batch.num_tokens != sequences or len(batch.sampled_rows) != sequences or batch.edges is not None:
        return None
    return Sizes(batch_bucket(sequences, max_batch_size), block_bucket(attention.block_tables.shape[1]))


class Graphs:
    """Recordings of the decoder by what they depend on."""

    def __init__(self, device: Device, forward: Callable[[StepBatch], Tensor]) -> None:
        self._device, self._forward = device, forward
        self._recordings: dict[Variant, _Recording] = {}
        self._memory: Memory = ()

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, step: StepBatch, sizes: Sizes, memory: Memory) -> Tensor:
        """Logits of a padded step whose tensors lie where those of its variant always do.

        When `memory` is not what it was, nothing lies where the recordings look for it.
        """
        if memory != self._memory:
            self.clear()
            self._memory = memory
        lora = step.lora
        variant = Variant(sizes, 0 if lora is None else len(lora.segment_slots))
        found = self._recordings.get(variant)
        if found is None:
            found = self._recordings[variant] = self._record(step)
        else:
            found.replay()
        return found.logits

    def clear(self) -> None:
        """Drop all recordings."""
        self._recordings.clear()
        self._device.forget_recordings()

    def _record(self, step: StepBatch) -> _Recording:
        logits: list[Tensor] = []
        replay = self._device.record(lambda: logits.append(self._forward(step)))
        return _Recording(replay, logits[-1])
