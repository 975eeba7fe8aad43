"""Measure the CUDA kernels and compare them with their targets; the command is `engine.check.gpu`.

Measures each LoRA kernel and attention in a model's shapes, with a cold L2 and without launch costs (a replayed graph),
relative to a copy on the same device and to two implementations in plain torch.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton import TritonKernels
from engine.kernels.triton.launch import Launch, run
from engine.kernels.triton.measure.cost import LARGE_BYTES, LARGE_SHARE, SMALL_EXTRA_S, Load, decode_step
from engine.kernels.triton.measure.shapes import LLAMA, ModelShape
from engine.kernels.triton.measure.workload import (
    Padded,
    Workload,
    adapter_tables,
    gathered_products,
    torch_loop,
    workload,
)
from engine.kernels.types import AttentionBatch, KvCache

FLUSH_BYTES = 512 << 20
COPY_BYTES = 1 << 30
REPEATS = 30
RESOLUTION_S = 0.5e-6
MIXED_RANKS = (8, 16, 32, 64)

Timer = Callable[[Callable[[], object]], float]
"""Seconds of one call of some work."""


@dataclass(frozen=True)
class KernelScale:
    """Sizes of a run. A case is the adapters' ranks and tokens; attention runs with `requests` sequences."""

    shape: ModelShape
    dtype: torch.dtype
    device: str
    cases: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    requests: int
    contexts: tuple[int, ...]


LLAMA_KERNELS = KernelScale(
    shape=LLAMA,
    dtype=torch.bfloat16,
    device="cuda",
    cases={
        "1 adapter, rank 16": ([16], [32]),
        "8 adapters, rank 16": ([16] * 8, [4] * 8),
        "32 adapters, rank 16": ([16] * 32, [1] * 32),
        "32 adapters, ranks 8 to 64": (MIXED_RANKS * 8, [1] * 32),
        "128 adapters, ranks 8 to 64": (MIXED_RANKS * 32, [1] * 128),
        "4 adapters, rank 16, prefill": ([16] * 4, [512] * 4),
    },
    requests=32,
    contexts=(1024, 4096),
)


@dataclass(frozen=True)
class Measurement:
    """Median seconds per call, the bytes it must move, and how many times longer the two torch versions take."""

    kernel: str
    case: str
    seconds: float
    num_bytes: int
    share_of_copy: float
    reached: bool
    loop_factor: float | None = None
    gathered_factor: float | None = None


@dataclass(frozen=True)
class Clock:
    """A timer, and the bandwidth of a copy on the same device."""

    seconds: Timer
    copy_bandwidth: float

    def measure(
        self, kernel: str, case: str, work: Callable[[], object], num_bytes: int, launches: int = 1
    ) -> Measurement:
        """Time launches and compare them with the target for their size; each launch may add to the minimum time."""
        seconds, least = self.seconds(work), num_bytes / self.copy_bandwidth
        share = least / seconds
        reached = share >= LARGE_SHARE if num_bytes >= LARGE_BYTES else seconds <= least + launches * SMALL_EXTRA_S
        return Measurement(kernel, case, seconds, num_bytes, share, reached)


def gpu_clock() -> Clock:
    """Times replays of a captured graph with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target, stream = torch.empty_like(source), torch.cuda.Stream()

    def replayed(work: Callable[[], object]) -> float:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(times)

    one = torch.empty(1, device="cuda")
    seconds = without_launch_time(replayed, one.zero_)
    return Clock(seconds, COPY_BYTES / seconds(lambda: target.copy_(source)))


def without_launch_time(timer: Timer, trivial: Callable[[], object]) -> Timer:
    """A timer that subtracts the time of a graph with one trivial kernel: launching takes as long as a small kernel.

    This also subtracts the trivial kernel's own time, about a microsecond. Returns at least the resolution of events.
    """
    start = timer(trivial)
    return lambda work: max(timer(work) - start, RESOLUTION_S)


def run_all(launches: list[Launch]) -> None:
    """Run the launches in order."""
    for launch in launches:
        run(launch)


def measure_lora(clock: Clock, scale: KernelScale) -> Iterator[Measurement]:
    """Shrink, expand and both together, for each fused group."""
    for case, (ranks, tokens) in scale.cases.items():
        tables = adapter_tables(scale.shape, ranks, scale.dtype, scale.device)
        for group in scale.shape.groups:
            yield from _measure_group(clock, case, group, workload(scale.shape, group, tables, tokens, scale.dtype))


def _measure_group(clock: Clock, case: str, group: str, work: Workload) -> Iterator[Measurement]:
    started: list[Launch] = []
    kernels = TritonKernels(started.append)
    kernels.lora_apply(work.y, work.x, work.sizes, work.lora, 0, work.projection)
    run_all(started)
    shrink, expand = (next(x for x in started if x.name == name) for name in ("shrink", "expand"))
    sizes = _bytes_moved(work)
    yield clock.measure(f"shrink {group}", case, lambda: run(shrink), sizes[0])
    yield clock.measure(f"expand {group}", case, lambda: run(expand), sizes[1])
    both = clock.measure(f"lora_apply {group}", case, lambda: run_all([shrink, expand]), sum(sizes), 2)
    yield _against_torch(clock, work, both)


def _bytes_moved(work: Workload) -> tuple[int, int]:
    """(shrink, expand): adapters and x read once, y read and written once; the intermediate is excluded."""
    a = sum(a.nbytes for adapter in work.matrices for a, _, _ in adapter)
    b = sum(b.nbytes for adapter in work.matrices for _, b, _ in adapter)
    return a + work.x.nbytes, b + 2 * work.y.nbytes


def _against_torch(clock: Clock, work: Workload, both: Measurement) -> Measurement:
    bounds, y = work.lora.segments.tolist(), work.y.clone()
    loop = clock.seconds(lambda: torch_loop(work, y, bounds))
    gathered = None
    if len(work.x) <= len(work.matrices):  # otherwise a copy of the adapter per token does not fit
        slots = torch.arange(len(work.x), device=y.device)
        padded = Padded.of(work)
        gathered = clock.seconds(lambda: gathered_products(work, padded, y, slots)) / both.seconds
    factors = {"loop_factor": loop / both.seconds, "gathered_factor": gathered}
    return Measurement(**{**asdict(both), **factors})


def check_shapes(scale: KernelScale) -> float:
    """Largest error over all cases and groups relative to the torch loop in fp32, in units of the tolerance."""
    worst = 0.0
    for ranks, tokens in scale.cases.values():
        tables = adapter_tables(scale.shape, ranks, scale.dtype, scale.device)
        for group in scale.shape.groups:
            work = workload(scale.shape, group, tables, tokens, scale.dtype)
            exact = Workload(work.x.float(), work.y.float(), work.sizes, work.projection, work.lora, _floats(work))
            expected, y = work.y.float().clone(), work.y.clone()
            torch_loop(exact, expected, work.lora.segments.tolist())
            TritonKernels().lora_apply(y, work.x, work.sizes, work.lora, 0, work.projection)
            worst = max(worst, error(y, expected) / TOLERANCE[scale.dtype])
    return worst


def _floats(work: Workload) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor, float], ...], ...]:
    return tuple(tuple((a.float(), b.float(), s) for a, b, s in adapter) for adapter in work.matrices)


def measure_attention(clock: Clock, scale: KernelScale) -> Iterator[Measurement]:
    """Decode attention at each context."""
    shape, count = scale.shape, scale.requests
    width = shape.num_heads * shape.head_dim
    for context in scale.contexts:
        kv, batch = _sequences(scale, context)
        q, out = (torch.randn(count, width, dtype=scale.dtype, device=scale.device) for _ in range(2))
        started: list[Launch] = []
        TritonKernels(started.append).paged_attention(q, kv, 0, batch, shape.num_heads, shape.head_dim**-0.5, out)
        run_all(started)
        work = [launch for launch in started if launch.name in ("attend", "combine")]
        costs = decode_step(Load(shape, count, 0, 0, context))
        num_bytes = round(sum(c.bytes_per_launch for c in costs if c.name in ("attend", "combine")))
        yield clock.measure("attend, combine", f"context {context}", partial(run_all, work), num_bytes, len(work))


def _sequences(scale: KernelScale, context: int) -> tuple[KvCache, AttentionBatch]:
    shape, dtype, count, device = scale.shape, scale.dtype, scale.requests, scale.device
    page_bytes = shape.page_bytes(dtype)
    tokens_per_page = page_bytes // (2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize)
    blocks = -(-context // tokens_per_page)
    values = torch.randn(1, count * blocks, page_bytes // dtype.itemsize, dtype=dtype, device=device)
    tables = torch.randperm(count * blocks, device=device).to(torch.int32).view(count, blocks)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    lengths = torch.full((count,), context, dtype=torch.int32, device=device)
    cache = KvCache(values.view(torch.uint8), shape.num_kv_heads, shape.head_dim)
    return cache, AttentionBatch(tables, starts, lengths)


@dataclass(frozen=True)
class KernelReport:
    """The results; `worst_error` is in units of the tolerance."""

    worst_error: float
    copy_bandwidth: float
    measurements: list[Measurement]


def measure_kernels(scale: KernelScale, make_clock: Callable[[], Clock]) -> KernelReport:
    """Check the results in all shapes, then measure."""
    worst = check_shapes(scale)
    clock = make_clock()
    found = [*measure_lora(clock, scale), *measure_attention(clock, scale)]
    return KernelReport(worst, clock.copy_bandwidth, found)
