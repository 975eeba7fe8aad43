"""Runs one step's forward pass and sampling, on host memory or on a device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.device.backend import Backend
from engine.lora.tables import SlotTables
from engine.memory.storage import Storage
from engine.model.batch import StepBatch
from engine.model.decoder import Decoder
from engine.scheduling.sequence import Sequence as ScheduledSequence
from engine.step.graphs import Graphs, MemoryVersion, padded_sizes
from engine.step.placement import arrays_of, one_segment_per_sequence, padded, with_tensors
from engine.step.sampling import SamplingBatch, build_sampling_batch, read_result, result_size, sample, sample_batch
from engine.step.staging import ALIGNMENT, Staging
from engine.step.warmup import StepLimits, warmup_steps
from engine.types import PageId, Sampled

BYTES_PER_TOKEN = 8
BYTES_PER_SEQUENCE = 64
SPARE_BYTES = 1 << 16


class Runner(Protocol):
    """Computes steps."""

    def run(self, batch: StepBatch, rows: Sequence[ScheduledSequence]) -> list[Sampled]:
        """Compute a step, store its keys and values, and sample the next token of each row in `rows`."""

    def warm_up(self, page: PageId) -> None:
        """Compile and record every kind of step, using a page that no sequence uses, and wait until it is done."""

    def close(self) -> None:
        """Drop all recordings."""


class LocalRunner:
    """Runs kernels that read host memory."""

    def __init__(self, backend: Backend, decoder: Decoder) -> None:
        self._kernels, self._decoder = backend.kernels, decoder

    def run(self, batch: StepBatch, rows: Sequence[ScheduledSequence]) -> list[Sampled]:
        """See `Runner.run`."""
        with torch.inference_mode():
            logits = self._decoder.forward(batch)
            return sample(logits, rows, self._kernels) if rows else []

    def warm_up(self, page: PageId) -> None:
        """See `Runner.warm_up`: nothing to do, the kernels are compiled when they are loaded."""

    def close(self) -> None:
        """See `Runner.close`: nothing is recorded."""


class RemoteRunner:
    """Runs kernels on a device: one copy sends a step's metadata, one returns its tokens; decode steps are recorded."""

    def __init__(
        self, config: EngineConfig, backend: Backend, decoder: Decoder, tables: SlotTables, storage: Storage
    ) -> None:
        self._backend, self._decoder, self._tables = backend, decoder, tables
        self._max_batch_size = config.max_batch_size
        length = min(decoder.max_tokens, config.max_batch_tokens)
        self._limits = StepLimits(config.max_batch_size, config.max_batch_tokens, length, storage.tokens_per_page)
        blocks = -(-decoder.max_tokens // storage.tokens_per_page)
        per_sequence = BYTES_PER_SEQUENCE + 2 * blocks * 4
        num_bytes = config.max_batch_tokens * BYTES_PER_TOKEN + config.max_batch_size * per_sequence + SPARE_BYTES
        # Room for all table rows in one step, since growing the buffer would invalidate every recording.
        num_bytes += sum(table.nbytes + len(table) * ALIGNMENT for table in tables.arrays)
        self._staging = Staging(backend.device, num_bytes)
        self._vocabulary = decoder.config.vocab_size
        width = result_size(self._vocabulary)
        self._results = backend.device.host(config.max_batch_size * width * 8).view(torch.float64).view(-1, width)
        self.graphs = Graphs(backend.device, decoder.forward) if config.graphs else None

    def run(self, batch: StepBatch, rows: Sequence[ScheduledSequence]) -> list[Sampled]:
        """See `Runner.run`."""
        sizes = padded_sizes(batch, self._max_batch_size) if self.graphs is not None else None
        host_step = one_segment_per_sequence(batch) if sizes is None else padded(batch, sizes)
        changes = list(self._tables.changes())
        arrays = arrays_of(host_step)
        sampling_arrays = build_sampling_batch(rows, self._vocabulary)
        tensors = self._staging.send([*arrays, *sampling_arrays, *(array for _, array in changes)])
        step, rest = with_tensors(host_step, tensors), tensors[len(arrays) :]
        sampling = SamplingBatch(*rest[: len(sampling_arrays)])
        with torch.inference_mode():
            for (row, _), value in zip(changes, rest[len(sampling_arrays) :], strict=True):
                row.copy_(value)
            if self.graphs is None or sizes is None:
                logits = self._decoder.forward(step)
            else:
                logits = self.graphs.run(step, sizes, self._memory())
            if not rows:
                return []
            return read_result(self._fetch(sample_batch(logits[: len(rows)], sampling, self._backend.kernels)), rows)

    def warm_up(self, page: PageId) -> None:
        """See `Runner.warm_up`."""
        for batch, rows in warmup_steps(self._limits, self._tables.layers, page):
            self.run(batch, rows)

    def close(self) -> None:
        """See `Runner.close`."""
        if self.graphs is not None:
            self.graphs.clear()

    def _fetch(self, result: torch.Tensor) -> torch.Tensor:
        """Copy the result to host memory: the only time in a step that the host waits for the device."""
        host_result, stream = self._results[: len(result)], self._backend.device.compute
        stream.copy(host_result, result)
        stream.record_event().wait()
        return host_result

    def _memory(self) -> MemoryVersion:
        """Generations rather than addresses: a new tensor with other strides can have an old one's address."""
        return self._staging.generation, self._tables.generation, self._tables.layers.rank_bound or 0


def make_runner(
    config: EngineConfig, backend: Backend, decoder: Decoder, tables: SlotTables, storage: Storage
) -> Runner:
    """Create the runner of a backend."""
    if backend.is_remote:
        return RemoteRunner(config, backend, decoder, tables, storage)
    return LocalRunner(backend, decoder)
