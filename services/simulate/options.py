"""What the options of `loraq simulate` describe: a trace, a fleet, an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from schemas.common import Lane
from services.errors import InputError
from services.simulate.engines.costs import Roofline
from services.simulate.engines.hardware import GPUS, MODELS
from services.simulate.engines.model import EngineModel
from services.simulate.engines.tiers import Tier
from services.simulate.measured import calibrate, read_json
from services.simulate.staging import StagingModel
from services.simulate.traces.trace import Bursts, Lengths, Synthetic, Trace, read_trace
from services.simulate.worker import WorkerModel

GB = 1e9
MEMORY_SHARE = 0.92
"""Of a GPU's memory that weights and pages use; the rest is activations, CUDA and fragments."""
DISK_LATENCY_S, HOST_LATENCY_S = 1e-4, 2e-5


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where the jobs come from."""

    trace: Path | None
    since: datetime | None
    jobs: int
    adapters: int
    tenants: int
    zipf: float
    rate: float
    burst: tuple[float, float]
    ranks: tuple[int, ...]
    lanes: Mapping[Lane, float]
    prompt: tuple[int, float]
    output: tuple[int, float]

    def drawn(self, seed: int) -> Trace:
        """The trace of the file, or a drawn one."""
        if self.trace is not None:
            return read_trace(self.trace, self.ranks[0])
        return Synthetic(
            self.jobs,
            self.adapters,
            min(self.tenants, self.adapters),
            self.zipf,
            self.rate,
            Bursts(*self.burst),
            self.ranks,
            self.lanes,
            Lengths(*self.prompt),
            Lengths(*self.output),
        ).draw(seed)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engine serves them, and where adapters are."""

    gpu: str
    model: str
    calibrate: tuple[Path, ...]
    batch: int
    batch_tokens: int
    pool_gb: float | None
    window: int
    host_gb: float
    disk_gb: float
    disk_rate: float
    store: tuple[float, float]
    store_total: float | None
    known_gb: float

    def worker(self, num_workers: int, *, is_aggregated: bool) -> WorkerModel:
        """The model of each of so many workers, which share the store's bandwidth equally."""
        engine, host_rate, disk_rate = self._engine()
        latency_s, rate = self.store
        if self.store_total is not None:
            rate = min(rate, self.store_total / num_workers)
        tiers = (
            Tier("host", self.host_gb * GB, HOST_LATENCY_S, host_rate),
            Tier("disk", self.disk_gb * GB, DISK_LATENCY_S, disk_rate),
            Tier("store", None, latency_s, rate),
        )
        return WorkerModel(engine, tiers, self.window, StagingModel(self.known_gb * GB), is_aggregated)

    def _engine(self) -> tuple[EngineModel, float, float]:
        """The engine, and bytes/s from host memory and from disk."""
        if self.calibrate:
            return self._calibrated()
        shape, gpu = MODELS[self.model], GPUS[self.gpu]
        pool = gpu.memory_bytes * MEMORY_SHARE - shape.weight_bytes if self.pool_gb is None else self.pool_gb * GB
        engine = EngineModel(
            shape, Roofline(shape, gpu), self._pages(pool, shape.pages().bytes_per_page), *self._limits
        )
        return engine, gpu.host_bytes_per_s, self.disk_rate

    def _calibrated(self) -> tuple[EngineModel, float, float]:
        """A CPU's engine reads adapters from the page cache into its pages: its host tier is the disk's files."""
        measured, data = calibrate(self.calibrate), read_json(self.calibrate[0])
        shape = MODELS["smollm2-135m" if self.model == "llama-8b" else self.model]
        pool = data.get("pool_bytes") or data["pool_mb"] * 1e6 if self.pool_gb is None else self.pool_gb * GB
        engine = EngineModel(shape, measured.steps, self._pages(pool, shape.pages().bytes_per_page), *self._limits)
        return engine, 1 / measured.read_byte_s, self.disk_rate

    @property
    def _limits(self) -> tuple[int, int]:
        return self.batch, max(self.batch_tokens, self.batch)

    def _pages(self, pool_bytes: float, page_bytes: int) -> int:
        if pool_bytes < page_bytes:
            raise InputError(f"a pool of {pool_bytes / GB:g} GB holds no page of this model; raise --pool-gb")
        return int(pool_bytes // page_bytes)


def check_fits(trace: Trace, model: WorkerModel) -> None:
    """Raise InputError unless every job fits into an empty pool with its adapter, and every adapter into its budget."""
    engine = model.engine
    pages_of = np.array([engine.shape.adapter_pages(rank, engine.pages) for rank in trace.adapters.rank])
    tokens = trace.prompt.astype(np.int64) + trace.output
    needed = pages_of[trace.adapter] - (-tokens // engine.pages.tokens_per_page)
    if (most := int(needed.max())) > engine.num_pages:
        page = engine.pages.bytes_per_page
        raise InputError(
            f"a job and its adapter need {most * page / GB:.3g} GB, the pool has {engine.num_pages * page / GB:.3g};"
            " raise --pool-gb"
        )
    largest = int(pages_of.max()) * engine.pages.bytes_per_page
    if model.staging is not None and largest > model.staging.budget_bytes:
        raise InputError(f"an adapter has {largest / GB:.3g} GB; raise --known-gb, LORAQ_HOST_CACHE_BYTES")
