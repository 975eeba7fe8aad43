"""One step's forward pass and sampling: on host memory as it lies, or on a device that all is copied to first."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.device.backend import Backend
from engine.lora.tables import SlotTables
from engine.memory.storage import Storage
from engine.model.batch import StepBatch
from engine.model.decoder import Decoder
from engine.scheduling.sequence import Sequence as Running
from engine.step.graphs import Graphs, Memory, sizes_for
from engine.step.placement import arrays_of, padded, with_tensors, without_mix
from engine.step.sampling import Choices, choices_of, choose, read, result_size, sample
from engine.step.staging import ALIGNMENT, Staging
from engine.step.warmup import Extent, idle_steps
from engine.types import PageId, Sampled

BYTES_PER_TOKEN = 8
BYTES_PER_SEQUENCE = 64
SPARE_BYTES = 1 << 16


class Runner(Protocol):
    """Computes a step."""

    def run(self, batch: StepBatch, rows: Sequence[Running]) -> list[Sampled]:
        """Store the step's keys and values and choose the next token of each sampled row."""

    def warm_up(self, page: PageId) -> None:
        """Do what is done once for every kind of step, on a page that is nobody's, and wait for it."""

    def close(self) -> None:
        """Drop what was recorded."""


class LocalRunner:
    """Operators that read the host's memory."""

    def __init__(self, backend: Backend, decoder: Decoder) -> None:
        self._kernels, self._decoder = backend.kernels, decoder

    def run(self, batch: StepBatch, rows: Sequence[Running]) -> list[Sampled]:
        """See `Runner.run`."""
        with torch.inference_mode():
            logits = self._decoder.forward(batch)
            return sample(logits, rows, self._kernels) if rows else []

    def warm_up(self, page: PageId) -> None:
        """See `Runner.warm_up`: the operators were compiled when they were loaded."""

    def close(self) -> None:
        """See `Runner.close`: nothing is recorded."""


class RemoteRunner:
    """Operators of a device: metadata goes there by one copy, decode steps are recorded, sampled tokens come back."""

    def __init__(
        self, config: EngineConfig, backend: Backend, decoder: Decoder, tables: SlotTables, storage: Storage
    ) -> None:
        self._backend, self._decoder, self._tables = backend, decoder, tables
        self._max_batch_size = config.max_batch_size
        length = min(decoder.max_tokens, config.max_batch_tokens)
        self._extent = Extent(config.max_batch_size, config.max_batch_tokens, length, storage.tokens_per_page)
        blocks = -(-decoder.max_tokens // storage.tokens_per_page)
        per_sequence = BYTES_PER_SEQUENCE + 2 * blocks * 4
        num_bytes = config.max_batch_tokens * BYTES_PER_TOKEN + config.max_batch_size * per_sequence + SPARE_BYTES
        # Many adapters loaded before one step send all their rows with it; to grow then would end every recording.
        num_bytes += sum(table.nbytes + len(table) * ALIGNMENT for table in tables.arrays)
        self._staging = Staging(backend.device, num_bytes)
        self._vocabulary = decoder.config.vocab_size
        width = result_size(self._vocabulary)
        self._results = backend.device.host(config.max_batch_size * width * 8).view(torch.float64).view(-1, width)
        self.graphs = Graphs(backend.device, decoder.forward) if config.graphs else None

    def run(self, batch: StepBatch, rows: Sequence[Running]) -> list[Sampled]:
        """See `Runner.run`."""
        sizes = sizes_for(batch, self._max_batch_size) if self.graphs is not None else None
        here = without_mix(batch) if sizes is None else padded(batch, sizes)
        changes = list(self._tables.changes())
        arrays = arrays_of(here)
        asked = choices_of(rows, self._vocabulary)
        tensors = self._staging.send([*arrays, *asked, *(array for _, array in changes)])
        step, rest = with_tensors(here, tensors), tensors[len(arrays) :]
        choices = Choices(*rest[: len(asked)])
        with torch.inference_mode():
            for (row, _), now in zip(changes, rest[len(asked) :], strict=True):
                row.copy_(now)
            if self.graphs is None or sizes is None:
                logits = self._decoder.forward(step)
            else:
                logits = self.graphs.run(step, sizes, self._memory())
            if not rows:
                return []
            return read(self._fetch(choose(logits[: len(rows)], choices, self._backend.kernels)), rows)

    def warm_up(self, page: PageId) -> None:
        """See `Runner.warm_up`."""
        for batch, rows in idle_steps(self._extent, self._tables.layers, page):
            self.run(batch, rows)

    def close(self) -> None:
        """See `Runner.close`."""
        if self.graphs is not None:
            self.graphs.clear()

    def _fetch(self, result: torch.Tensor) -> torch.Tensor:
        """In host memory: the only time in a step that the host waits for the device."""
        here, stream = self._results[: len(result)], self._backend.device.compute
        stream.copy(here, result)
        stream.mark().wait()
        return here

    def _memory(self) -> Memory:
        """Not addresses: new tensors of other strides may come to lie where the old ones did."""
        return self._staging.generation, self._tables.generation, self._tables.layers.rank_bound or 0


def make_runner(
    config: EngineConfig, backend: Backend, decoder: Decoder, tables: SlotTables, storage: Storage
) -> Runner:
    """The runner of a backend."""
    if backend.is_remote:
        return RemoteRunner(config, backend, decoder, tables, storage)
    return LocalRunner(backend, decoder)
