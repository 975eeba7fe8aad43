"""Checks the CUDA kernels on this machine's GPU and measures them; exit code 2 where there is none.

`python3 -m engine.kernels.triton.gpu_check` from the repository's root, or `make gpu-check`. Runs the full test grid on
the device, then measures each LoRA kernel and attention in the shapes of Llama-3-8B, with a cold L2 and without launch
costs (a replayed graph), against what a copy on the same device reaches and against two ways to do it with torch
alone. Prints one table and writes gpu-check.json.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton

from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton import TritonKernels
from engine.kernels.triton.cost import LARGE_BYTES, LARGE_SHARE, LLAMA, SMALL_EXTRA_S, Load, decode_step
from engine.kernels.triton.launch import Launch, run
from engine.kernels.triton.workload import (
    Padded,
    Workload,
    adapter_tables,
    gathered_products,
    torch_loop,
    workload,
)
from engine.kernels.types import AttentionBatch, KvCache

DTYPE = torch.bfloat16
REPORT = Path("gpu-check.json")
GRID = "tests/engine/kernels/triton/grid"
NO_GPU = 2
FLUSH_BYTES = 512 << 20
COPY_BYTES = 1 << 30
REPEATS = 30
REQUESTS = 32
MIXED_RANKS = (8, 16, 32, 64)
CASES = {
    "1 adapter, rank 16": ([16], [REQUESTS]),
    "8 adapters, rank 16": ([16] * 8, [4] * 8),
    "32 adapters, rank 16": ([16] * 32, [1] * 32),
    "32 adapters, ranks 8 to 64": (list(MIXED_RANKS) * 8, [1] * 32),
    "128 adapters, ranks 8 to 64": (list(MIXED_RANKS) * 32, [1] * 128),
    "4 adapters, rank 16, prefill": ([16] * 4, [512] * 4),
}


@dataclass(frozen=True)
class Measurement:
    """Median seconds of one call; bytes that it must move; how many times longer the torch loop and products take."""

    kernel: str
    case: str
    seconds: float
    num_bytes: int
    share_of_copy: float
    reached: bool | None
    loop_factor: float | None = None
    gathered_factor: float | None = None


class Clock:
    """Times work on the device with a cold L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.copy_bandwidth = COPY_BYTES / self.seconds(lambda: target.copy_(source))

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of replays of a captured graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(times)

    def measure(self, kernel: str, case: str, work: Callable[[], object], num_bytes: int) -> Measurement:
        """Time a kernel and hold it to the target for its size."""
        seconds, least = self.seconds(work), num_bytes / self.copy_bandwidth
        share = least / seconds
        reached = share >= LARGE_SHARE if num_bytes >= LARGE_BYTES else seconds <= least + SMALL_EXTRA_S
        return Measurement(kernel, case, seconds, num_bytes, share, reached)


def run_grid() -> int:
    """The full test grid on the device; its exit code. Warnings of versions that we do not pin fail nothing here."""
    environment = {**os.environ, "KERNEL_GRID": "full"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "default", GRID], env=environment, check=False
    ).returncode


def run_all(launches: list[Launch]) -> None:
    """One after the other."""
    for launch in launches:
        run(launch)


def measure_lora(clock: Clock) -> Iterator[Measurement]:
    """Shrink, expand and both together, for each fused group."""
    for case, (ranks, tokens) in CASES.items():
        tables = adapter_tables(LLAMA, ranks, DTYPE, "cuda")
        for group in LLAMA.groups:
            yield from _measure_group(clock, case, group, workload(LLAMA, group, tables, tokens, DTYPE))


def _measure_group(clock: Clock, case: str, group: str, work: Workload) -> Iterator[Measurement]:
    started: list[Launch] = []
    kernels = TritonKernels(started.append)
    kernels.lora_apply(work.y, work.x, work.sizes, work.lora, 0, work.projection)
    run_all(started)
    shrink, expand = (next(x for x in started if x.name == name) for name in ("shrink", "expand"))
    sizes = _bytes_moved(work)
    yield clock.measure(f"shrink {group}", case, lambda: run(shrink), sizes[0])
    yield clock.measure(f"expand {group}", case, lambda: run(expand), sizes[1])
    both = clock.measure(f"lora_apply {group}", case, lambda: run_all([shrink, expand]), sum(sizes))
    yield _against_torch(clock, work, both)


def _bytes_moved(work: Workload) -> tuple[int, int]:
    """(shrink, expand): adapters and x read once, y read and written once; the intermediate is not counted."""
    a = sum(a.nbytes for adapter in work.matrices for a, _, _ in adapter)
    b = sum(b.nbytes for adapter in work.matrices for _, b, _ in adapter)
    return a + work.x.nbytes, b + 2 * work.y.nbytes


def _against_torch(clock: Clock, work: Workload, both: Measurement) -> Measurement:
    bounds, y = work.lora.segments.tolist(), work.y.clone()
    loop = clock.seconds(lambda: torch_loop(work, y, bounds))
    gathered = None
    if len(work.x) <= len(work.matrices):  # every token's own copy of its adapter does not fit otherwise
        slots = torch.arange(len(work.x), device="cuda")
        padded = Padded.of(work)
        gathered = clock.seconds(lambda: gathered_products(work, padded, y, slots)) / both.seconds
    factors = {"loop_factor": loop / both.seconds, "gathered_factor": gathered}
    return Measurement(**{**asdict(both), **factors})


def check_large_shapes() -> float:
    """Largest error over all cases and groups, in units of the tolerance, against the loop in fp32."""
    worst = 0.0
    for ranks, tokens in CASES.values():
        tables = adapter_tables(LLAMA, ranks, DTYPE, "cuda")
        for group in LLAMA.groups:
            work = workload(LLAMA, group, tables, tokens, DTYPE)
            exact = Workload(work.x.float(), work.y.float(), work.sizes, work.projection, work.lora, _floats(work))
            expected, y = work.y.float().clone(), work.y.clone()
            torch_loop(exact, expected, work.lora.segments.tolist())
            TritonKernels().lora_apply(y, work.x, work.sizes, work.lora, 0, work.projection)
            worst = max(worst, error(y, expected) / TOLERANCE[DTYPE])
    return worst


def _floats(work: Workload) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor, float], ...], ...]:
    return tuple(tuple((a.float(), b.float(), s) for a, b, s in adapter) for adapter in work.matrices)


def measure_attention(clock: Clock) -> Iterator[Measurement]:
    """Decode attention at two contexts."""
    for context in (1024, 4096):
        kv, batch = _sequences(context)
        width = LLAMA.num_heads * LLAMA.head_dim
        q, out = (torch.randn(REQUESTS, width, dtype=DTYPE, device="cuda") for _ in range(2))
        started: list[Launch] = []
        TritonKernels(started.append).paged_attention(q, kv, 0, batch, LLAMA.num_heads, LLAMA.head_dim**-0.5, out)
        run_all(started)
        work = [launch for launch in started if launch.name in ("attend", "combine")]
        costs = decode_step(Load(LLAMA, REQUESTS, 0, 0, context))
        num_bytes = round(sum(c.bytes_per_launch for c in costs if c.name in ("attend", "combine")))
        yield clock.measure("attend, combine", f"context {context}", partial(run_all, work), num_bytes)


def _sequences(context: int) -> tuple[KvCache, AttentionBatch]:
    page_bytes = LLAMA.page_bytes(DTYPE)
    tokens_per_page = page_bytes // (2 * LLAMA.num_kv_heads * LLAMA.head_dim * DTYPE.itemsize)
    blocks = -(-context // tokens_per_page)
    values = torch.randn(1, REQUESTS * blocks, page_bytes // DTYPE.itemsize, dtype=DTYPE, device="cuda")
    tables = torch.randperm(REQUESTS * blocks, device="cuda").to(torch.int32).view(REQUESTS, blocks)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((REQUESTS,), context, dtype=torch.int32, device="cuda")
    return KvCache(values.view(torch.uint8), LLAMA.num_kv_heads, LLAMA.head_dim), AttentionBatch(
        tables, starts, lengths
    )


def table(found: list[Measurement]) -> str:
    """Aligned rows for a terminal, which are Markdown as well."""
    lines = [
        "| kernel | case | µs | MB | share of copy | target | torch loop | gathered bmm |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for m in found:
        factors = (f"{f:.1f}x" if f is not None else "" for f in (m.loop_factor, m.gathered_factor))
        reached = {True: "reached", False: "missed", None: ""}[m.reached]
        cells = (
            m.kernel,
            m.case,
            f"{m.seconds * 1e6:.1f}",
            f"{m.num_bytes / 1e6:.1f}",
            f"{m.share_of_copy:.2f}",
            reached,
        )
        lines.append(f"| {' | '.join((*cells, *factors))} |")
    return "\n".join(lines)


def main() -> int:
    """Check, measure, report; 0 when everything is right, 1 when not, 2 without a GPU."""
    if not torch.cuda.is_available():
        sys.stderr.write(
            "gpu-check: torch sees no CUDA device here, so nothing was checked; run it on a GPU machine.\n"
        )
        return NO_GPU
    name = torch.cuda.get_device_name()
    sys.stdout.write(f"{name}, torch {torch.__version__}, Triton {triton.__version__}\n")
    grid = run_grid()
    worst = check_large_shapes()
    clock = Clock()
    found = [*measure_lora(clock), *measure_attention(clock)]
    sys.stdout.write(
        f"{table(found)}\ncopy: {clock.copy_bandwidth / 1e12:.2f} TB/s; worst error: {worst:.2f} tolerances\n"
    )
    report = {
        "gpu": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python3 -m engine.kernels.triton.gpu_check",
        "dtype": "bfloat16",
        "grid_exit_code": grid,
        "worst_error_in_tolerances": worst,
        "copy_bytes_per_s": clock.copy_bandwidth,
        "measurements": [asdict(m) for m in found],
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    return int(grid != 0 or worst >= 1)


if __name__ == "__main__":
    sys.exit(main())
