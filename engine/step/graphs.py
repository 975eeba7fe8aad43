"""Records decode steps of a few padded sizes once and replays them for any adapters and ranks.

Rows are padded to a bucket of the batch size, and block tables to a bucket of the context length. The kernels build
their work lists on the device, so a recording is valid for every mix of adapters. It becomes invalid when the tables or
buffers are reallocated, or when an adapter's rank exceeds the bound that the kernels were given.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.device import Device
from engine.model.batch import StepBatch
from engine.step.placement import PaddedSizes

MemoryVersion = tuple[int, ...]
"""Generations of the buffers that recordings use, and the rank bound; recordings are invalid once it changes."""

SMALL_BUCKETS = (1, 2, 4)
BUCKET_STEP = 8
MIN_BLOCKS = 16
"""Attention programs without keys cost less than separate recordings for short contexts."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The key of a recording. `num_segments` is 0 for the base model alone and 1 for a single adapter."""

    sizes: PaddedSizes
    num_segments: int


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded step; each replay writes `logits`."""

    replay: Callable[[], None]
    logits: Tensor


def batch_buckets(max_batch_size: int) -> list[int]:
    """All numbers of rows that decode steps are padded to, in ascending order."""
    return sorted({batch_bucket(sequences, max_batch_size) for sequences in range(1, max_batch_size + 1)})


def batch_bucket(sequences: int, max_batch_size: int) -> int:
    """The number of rows that a decode step of this many sequences is padded to."""
    small = next((size for size in SMALL_BUCKETS if sequences <= size), None)
    return min(small or -(-sequences // BUCKET_STEP) * BUCKET_STEP, max_batch_size)


def block_bucket(blocks: int) -> int:
    """The length that block tables of this many blocks are padded to."""
    return max(MIN_BLOCKS, 1 << (blocks - 1).bit_length())


def padded_sizes(batch: StepBatch, max_batch_size: int) -> PaddedSizes | None:
    """The padded sizes of a step. None if it is not recorded: it is not a decode step, or adapts embedding or head."""
    attention = batch.attention
    sequences = len(attention.context_lens)
    if batch.num_tokens != sequences or len(batch.sampled_rows) != sequences or batch.edges is not None:
        return None
    return PaddedSizes(batch_bucket(sequences, max_batch_size), block_bucket(attention.block_tables.shape[1]))


class Graphs:
    """The recordings of a decoder by variant."""

    def __init__(self, device: Device, forward: Callable[[StepBatch], Tensor]) -> None:
        self._device, self._forward = device, forward
        self._recordings: dict[Variant, _Recording] = {}
        self._memory: MemoryVersion = ()

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, step: StepBatch, sizes: PaddedSizes, memory: MemoryVersion) -> Tensor:
        """Logits of a padded step, whose tensors must have the same addresses as in its variant's recording.

        A change of `memory` means that addresses have changed, and drops all recordings.
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
        self._device.discard_recordings()

    def _record(self, step: StepBatch) -> _Recording:
        logits: list[Tensor] = []
        replay = self._device.record(lambda: logits.append(self._forward(step)))
        return _Recording(replay, logits[-1])
