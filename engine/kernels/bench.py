"""`python -m engine.kernels.bench`: the cost of each CPU operator in a step of SmolLM2-135M, as a share of the peak.

A line is one operator over all 30 layers, whose weights, adapters and KV are distinct memory as in a real step: the sum
of the best time of each layer, and its share of the machine's peak for its bottleneck, bandwidth or arithmetic. The
peaks are measured first. Best times of short pieces are least affected by other work on the machine.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import TILE_COLUMNS, TILE_RANKS, AttentionBatch, KvCache, LoraBatch, LoraTables, PackedLinear
from engine.kernels.cpu import CpuKernels
from engine.kernels.layout import column_tiles, padded_rank
from engine.kernels.memory import huge_zeros

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
KV = KV_HEADS * HEAD_DIM
GROUPS = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV), 0),
    "o": (HIDDEN, (HIDDEN,), 3),
    "gate_up": (HIDDEN, (MLP, MLP), 4),
    "down": (MLP, (HIDDEN,), 6),
}
RANKS = (8, 16, 32, 64)
TOKENS_PER_PAGE = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One measured operator: the bytes and FLOPs it needs, and a call that runs one of its pieces."""

    name: str
    num_bytes: float
    num_flops: float
    call: Callable[[int], object]
    pieces: int = 1


@dataclass(frozen=True)
class Machine:
    """Measured peaks: bytes/s read from memory and floating-point operations/s in bf16."""

    read: float
    multiply: float


def measure_machine(kernels: CpuKernels) -> Machine:
    """The best of several probes, over memory far larger than the caches and over registers only."""
    probes, memory = kernels.probes(), torch.ones(1 << 29, dtype=torch.uint8)
    read = memory.numel() / best_seconds(lambda: probes.read_probe(memory), 10)
    repeats = 1_000_000
    flops = probes.multiply_probe(torch.empty(0, dtype=DTYPE), repeats)
    multiply = flops / best_seconds(lambda: probes.multiply_probe(torch.empty(0, dtype=DTYPE), repeats), 10)
    return Machine(read, multiply)


def best_seconds(call: Callable[[], object], rounds: int) -> float:
    """The shortest of `rounds` runs: other processes can only add time."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def base_rows(kernels: CpuKernels, num_tokens: int, num_logits: int) -> list[Row]:
    """The base products of every layer and of the output layer."""
    rows = []
    for name, (k, sizes, _) in GROUPS.items():
        layers = [kernels.pack_linear([torch.randn(n, k).to(DTYPE) for n in sizes]) for _ in range(LAYERS)]
        x, out = torch.randn(num_tokens, k).to(DTYPE), torch.empty(num_tokens, sum(sizes), dtype=DTYPE)
        weights = LAYERS * k * sum(sizes)

        run = functools.partial(_linear, kernels, x, layers, out)
        rows.append(Row(f"linear {name}", 2 * weights, 2 * weights * num_tokens, run, LAYERS))
    head = kernels.pack_linear([torch.randn(VOCAB, HIDDEN).to(DTYPE)])
    x, logits = torch.randn(num_logits, HIDDEN).to(DTYPE), torch.empty(num_logits, VOCAB)
    size = VOCAB * HIDDEN
    rows.append(Row("linear lm_head", 2 * size, 2 * size * num_logits, lambda _: kernels.linear(x, head, logits)))
    rows.append(Row("logit_stats", logits.nbytes, 0, lambda _: kernels.logit_stats(logits)))
    ids, embedded = torch.randint(VOCAB, (num_tokens,)), torch.empty(num_tokens, HIDDEN, dtype=DTYPE)
    rows.append(Row("embed", embedded.nbytes, 0, lambda _: kernels.embed(ids, head, embedded)))
    return rows


def _linear(kernels: CpuKernels, x: Tensor, layers: list[PackedLinear], out: Tensor, layer: int) -> None:
    kernels.linear(x, layers[layer], out)


def _lora_linear(
    kernels: CpuKernels, x: Tensor, layers: list[PackedLinear], lora: LoraBatch, first: int, out: Tensor, layer: int
) -> None:
    kernels.lora_linear(x, layers[layer], lora, layer, first, out)


def random_pool(num_pages: int, page_bytes: int) -> Tensor:
    """uint8 [L, P, page_bytes] of small random numbers, in huge pages like the engine's pool."""
    pool = huge_zeros(LAYERS * num_pages * page_bytes)
    values = pool.view(DTYPE)
    values[: 1 << 20] = torch.randn(1 << 20).mul_(0.05)
    for start in range(1 << 20, len(values), 1 << 20):
        part = values[start : start + (1 << 20)]
        part.copy_(values[: len(part)])
    return pool.view(LAYERS, num_pages, page_bytes)


def lora_tables(num_adapters: int) -> LoraTables:
    """Adapters on all projections with ranks cycling 8, 16, 32, 64, in pages of 16 tokens' KV."""
    page_bytes = 2 * KV * TOKENS_PER_PAGE * DTYPE.itemsize
    tile = TILE_RANKS * TILE_COLUMNS * DTYPE.itemsize
    parts, counts = torch.zeros(num_adapters, LAYERS, 7, 2, dtype=torch.int32), []
    for slot in range(num_adapters):
        tiles, rank = 0, padded_rank(RANKS[slot % len(RANKS)])
        for k, sizes, first in GROUPS.values():
            for index, n in enumerate(sizes):
                parts[slot, :, first + index] = torch.tensor([tiles, rank])
                tiles += rank // TILE_RANKS * (column_tiles(k) + column_tiles(n))
        counts.append(-(-tiles * tile // page_bytes))
    pool = random_pool(sum(counts), page_bytes)
    pages = torch.full((num_adapters, max(counts)), -1, dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    for slot, own in enumerate(torch.split(ids, counts)):
        pages[slot, : len(own)] = own
    scales = torch.ones(num_adapters, LAYERS, 7)
    return LoraTables(pool, pages, parts, scales)


def lora_rows(kernels: CpuKernels, num_adapters: int, tokens_each: int) -> list[Row]:
    """The base products with LoRA, with a segment of `tokens_each` tokens per adapter."""
    tables = lora_tables(num_adapters)
    num_tokens = num_adapters * tokens_each
    segments = torch.arange(0, num_tokens + 1, tokens_each, dtype=torch.int32)
    lora = LoraBatch(tables, segments, torch.arange(num_adapters, dtype=torch.int32))
    rows = []
    for name, (k, sizes, first) in GROUPS.items():
        layers = [kernels.pack_linear([torch.randn(n, k).to(DTYPE) for n in sizes]) for _ in range(LAYERS)]
        x, out = torch.randn(num_tokens, k).to(DTYPE), torch.empty(num_tokens, sum(sizes), dtype=DTYPE)
        ranks = sum(RANKS[slot % len(RANKS)] for slot in range(num_adapters))
        base, values = LAYERS * k * sum(sizes), LAYERS * ranks * sum(k + n for n in sizes)

        run = functools.partial(_lora_linear, kernels, x, layers, lora, first, out)
        flops = 2 * base * num_tokens + 2 * values * tokens_each
        rows.append(Row(f"lora_linear {name}", 2 * (base + values), flops, run, LAYERS))
    return rows


def attention_rows(kernels: CpuKernels, num_sequences: int, past: int, new: int) -> list[Row]:
    """Rope with the KV write, and attention, for `new` tokens per sequence after `past` ones."""
    total = past + new
    blocks = -(-total // TOKENS_PER_PAGE)
    pool = random_pool(num_sequences * blocks, 2 * KV * TOKENS_PER_PAGE * DTYPE.itemsize)
    kv = KvCache(pool, KV_HEADS, HEAD_DIM)
    table = torch.randperm(num_sequences * blocks).to(torch.int32).view(num_sequences, blocks)
    starts = torch.arange(0, num_sequences * new + 1, new, dtype=torch.int32)
    batch = AttentionBatch(table, starts, torch.full((num_sequences,), total, dtype=torch.int32))
    num_tokens = num_sequences * new
    qkv = torch.randn(num_tokens, HIDDEN + 2 * KV).to(DTYPE)
    out, cos_sin = torch.empty(num_tokens, HIDDEN, dtype=DTYPE), torch.randn(8192, HEAD_DIM)

    def rope(layer: int) -> None:
        kernels.rope_write_kv(qkv, kv, layer, batch, HEADS, cos_sin)

    def attend(layer: int) -> None:
        kernels.paged_attention(qkv, kv, layer, batch, HEADS, 0.125, out)

    pairs = LAYERS * HEADS * num_sequences * sum(range(past + 1, total + 1))
    kv_bytes = LAYERS * num_sequences * total * 2 * KV * DTYPE.itemsize
    return [
        Row("rope_write_kv", LAYERS * 2 * qkv.nbytes, 0, rope, LAYERS),
        Row("paged_attention", kv_bytes, 4 * HEAD_DIM * pairs, attend, LAYERS),
    ]


def elementwise_rows(kernels: CpuKernels, num_tokens: int) -> list[Row]:
    """Both norms of every layer and the gated activation."""
    x, residual = (torch.randn(num_tokens, HIDDEN).to(DTYPE) for _ in range(2))
    weight, out = torch.randn(HIDDEN).to(DTYPE), torch.empty(num_tokens, HIDDEN, dtype=DTYPE)
    gate_up, activated = (torch.randn(num_tokens, n).to(DTYPE) for n in (2 * MLP, MLP))

    def norm(_: int) -> None:
        kernels.rms_norm(x, weight, 1e-5, out, residual)

    return [
        Row("rms_norm", 2 * LAYERS * 4 * x.nbytes, 0, norm, 2 * LAYERS),
        Row("silu_mul", LAYERS * 3 * activated.nbytes, 0, lambda _: kernels.silu_mul(gate_up, activated), LAYERS),
    ]


def decode_rows(kernels: CpuKernels) -> list[Row]:
    """One new token for each of 32 sequences of 96 tokens, each with its own adapter."""
    return [
        *base_rows(kernels, 32, 32),
        *lora_rows(kernels, 32, 1),
        *attention_rows(kernels, 32, 95, 1),
        *elementwise_rows(kernels, 32),
    ]


def prefill_rows(kernels: CpuKernels) -> list[Row]:
    """32 prompts of 64 tokens, each with its own adapter."""
    return [
        *base_rows(kernels, 2048, 32),
        *lora_rows(kernels, 32, 64),
        *attention_rows(kernels, 32, 0, 64),
        *elementwise_rows(kernels, 2048),
    ]


SUITES = {"decode": decode_rows, "prefill": prefill_rows}


def measure(rows: list[Row], machine: Machine, rounds: int) -> list[dict[str, object]]:
    """The sum of each piece's best of `rounds`; rows alternate, so that a load spike does not affect only one row."""
    times = [[float("inf")] * row.pieces for row in rows]
    for _ in range(rounds):
        for row, best in zip(rows, times, strict=True):
            for piece in range(row.pieces):
                best[piece] = min(best[piece], best_seconds(functools.partial(row.call, piece), 1))
    return [_result(row, sum(best), machine) for row, best in zip(rows, times, strict=True)]


def _result(row: Row, seconds: float, machine: Machine) -> dict[str, object]:
    floor = max(row.num_bytes / machine.read, row.num_flops / machine.multiply)
    return {
        "operator": row.name,
        "ms": round(seconds * 1e3, 3),
        "gb_per_s": round(row.num_bytes / seconds / 1e9, 1),
        "gflop_per_s": round(row.num_flops / seconds / 1e9, 1),
        "share_of_peak": round(floor / seconds, 3),
    }


def main() -> None:
    """Print the tables; `--json` prints one object instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--suite", choices=list(SUITES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = CpuKernels()
    machine = measure_machine(kernels)
    chosen = [options.suite] if options.suite else list(SUITES)
    results = {name: measure(SUITES[name](kernels), machine, options.rounds) for name in chosen}
    peaks = {"read_gb_per_s": machine.read / 1e9, "bf16_gflop_per_s": machine.multiply / 1e9}
    write = sys.stdout.write
    if options.json:
        write(json.dumps({"machine": peaks, "results": results}) + "\n")
        return
    write(f"reads {peaks['read_gb_per_s']:.1f} GB/s, multiplies bf16 at {peaks['bf16_gflop_per_s']:.0f} GFLOP/s\n")
    for name, lines in results.items():
        write(f"\n{name}\n{'operator':22}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of peak':>9}\n")
        for line in lines:
            numbers = f"{line['ms']:9}{line['gb_per_s']:8}{line['gflop_per_s']:9}{line['share_of_peak']:9}"
            write(f"{line['operator']:22}{numbers}\n")


if __name__ == "__main__":
    main()
