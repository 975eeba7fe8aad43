"""Bytes and FLOPs of one decode step, from shapes alone, and the share of a GPU's bandwidth each kernel must reach."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.kernels.triton.measure.shapes import LLAMA, ModelShape
from engine.kernels.triton.table import ATTENTION, EXPAND, SHRINK, width
from engine.kernels.types import TILE_COLUMNS

BANDWIDTH = {"H100 SXM": 3.35e12, "H200": 4.8e12}
VALUE, FLOAT = 2, 4
LARGE_BYTES = 64_000_000
LARGE_SHARE = 0.70
SMALL_EXTRA_S = 3e-6
RATIO_KEPT = 0.95
# Assumed, not measured: the time that one launch less saves in a replayed graph, the L2's bandwidth relative to the
# memory's, and the read bandwidth of one program of a few warps.
LAUNCH_S, L2_SPEEDUP, PROGRAM_BYTES_PER_S = 2e-6, 3, 60e9


@dataclass(frozen=True)
class Load:
    """One decode step: each of `requests` sequences computes one token; adapters cover all seven projections."""

    model: ModelShape
    requests: int
    adapters: int
    rank: int
    context: int


@dataclass(frozen=True)
class KernelCost:
    """One kernel's cost in a step: launches, and their total bytes and FLOPs. `is_lora`: runs only with adapters."""

    name: str
    launches: int
    num_bytes: int
    flops: int
    is_lora: bool = False

    @property
    def bytes_per_launch(self) -> float:
        """Bytes that one launch moves."""
        return self.num_bytes / self.launches

    def minimum_s(self, bandwidth: float) -> float:
        """Seconds per launch at full memory bandwidth."""
        return self.bytes_per_launch / bandwidth

    def share_to_reach(self, bandwidth: float) -> float:
        """70 % of the bandwidth from 64 MB; below that, the share that allows 3 µs more than the minimum time."""
        if self.bytes_per_launch >= LARGE_BYTES:
            return LARGE_SHARE
        return self.minimum_s(bandwidth) / (self.minimum_s(bandwidth) + SMALL_EXTRA_S)


def decode_step(load: Load) -> list[KernelCost]:
    """The cost of every kernel of a step. Weights, adapters and KV are read once, activations read and written once."""
    return [*_base(load), *_lora(load), *_attention(load), *_rest(load)]


def _base(load: Load) -> Iterator[KernelCost]:
    model, rows = load.model, load.requests
    for name, (k, sizes, _) in model.groups.items():
        n = sum(sizes)
        moved = (k * n + rows * (k + n)) * VALUE
        yield KernelCost(
            f"linear {name}", model.num_layers, model.num_layers * moved, model.num_layers * 2 * rows * k * n
        )
    head = model.vocabulary * model.hidden
    logits = rows * model.vocabulary * FLOAT
    yield KernelCost("linear head", 1, (head + rows * model.hidden) * VALUE + logits, 2 * rows * head)


def _lora(load: Load) -> Iterator[KernelCost]:
    model, rows, rank, layers = load.model, load.requests, load.rank, load.model.num_layers
    for name, (k, sizes, _) in model.groups.items():
        parts, n = len(sizes), sum(sizes)
        between = rows * SHRINK["decode", width(k), 90].split_k * parts * rank * FLOAT
        moved = load.adapters * parts * rank * k * VALUE + rows * k * VALUE + between
        yield KernelCost(f"shrink {name}", layers, layers * moved, layers * 2 * rows * parts * rank * k, is_lora=True)
        moved = load.adapters * rank * n * VALUE + between + 2 * rows * n * VALUE
        yield KernelCost(f"expand {name}", layers, layers * moved, layers * 2 * rows * rank * n, is_lora=True)


def _attention(load: Load) -> Iterator[KernelCost]:
    model, rows, layers = load.model, load.requests, load.model.num_layers
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    parts = -(-load.context // ATTENTION["decode", 90].partition)
    partial = rows * parts * (q + 2 * model.num_heads) * FLOAT
    read = rows * load.context * 2 * kv * VALUE + rows * q * VALUE
    yield KernelCost("attend", layers, layers * (read + partial), layers * 4 * rows * load.context * q)
    yield KernelCost("combine", layers, layers * (partial + rows * q * VALUE), layers * 2 * rows * parts * q)


def _rest(load: Load) -> Iterator[KernelCost]:
    model, rows, layers = load.model, load.requests, load.model.num_layers
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    kv = 2 * model.num_kv_heads * model.head_dim
    norms = 2 * layers + 1
    yield KernelCost("rope_write_kv", layers, layers * rows * (2 * qkv + kv) * VALUE, layers * rows * 3 * qkv)
    yield KernelCost("rms_norm", norms, norms * rows * 4 * model.hidden * VALUE, norms * rows * 5 * model.hidden)
    yield KernelCost("silu_mul", layers, layers * rows * 3 * model.inner * VALUE, layers * rows * 5 * model.inner)
    yield KernelCost("embed", 1, 2 * rows * model.hidden * VALUE, 0)
    yield KernelCost("logit_stats", 1, rows * model.vocabulary * FLOAT, 3 * rows * model.vocabulary)


def ratio(costs: list[KernelCost]) -> float:
    """Decode speed with adapters relative to that without, if both reach the same bandwidth."""
    lora = sum(cost.num_bytes for cost in costs if cost.is_lora)
    return 1 - lora / sum(cost.num_bytes for cost in costs)


def lora_share_to_reach(costs: list[KernelCost]) -> float:
    """The LoRA kernels' bandwidth relative to the other kernels' that is needed to keep 95 % of `ratio`."""
    allowed = ratio(costs)
    return (1 / allowed - 1) / (1 / (RATIO_KEPT * allowed) - 1)


def fused_added_s(load: Load, group: str, bandwidth: float) -> float:
    """Modelled seconds that fusing shrink and expand would add, since every block of columns repeats the shrink.

    All blocks read their projection's A from the L2, and each block reads all of it before it starts to expand.
    """
    k, sizes, _ = load.model.groups[group]
    columns = EXPAND["decode", 90].tiles_n * TILE_COLUMNS
    matrix = load.rank * k * VALUE
    repeats = sum(-(-n // columns) - 1 for n in sizes)
    return max(load.adapters * repeats * matrix / (L2_SPEEDUP * bandwidth), matrix / PROGRAM_BYTES_PER_S)


EXAMPLE = Load(LLAMA, requests=32, adapters=32, rank=16, context=1024)


def report(load: Load = EXAMPLE) -> str:
    """The step as a Markdown table."""
    costs = decode_step(load)
    lines = [
        *_summary(load, costs),
        "",
        "| kernel | launches | MB per launch | MFLOP per launch | "
        + " | ".join(f"µs at full bandwidth, {gpu} | share to reach" for gpu in BANDWIDTH)
        + " |",
        "| --- |" + " ---: |" * (3 + 2 * len(BANDWIDTH)),
    ]
    for cost in costs:
        times = (f"{1e6 * cost.minimum_s(b):.2f} | {cost.share_to_reach(b):.2f}" for b in BANDWIDTH.values())
        size = f"{cost.bytes_per_launch / 1e6:.2f} | {cost.flops / cost.launches / 1e6:.1f}"
        lines.append(f"| {cost.name} | {cost.launches} | {size} | {' | '.join(times)} |")
    return "\n".join(lines)


def _summary(load: Load, costs: list[KernelCost]) -> list[str]:
    lora = [cost for cost in costs if cost.is_lora]
    total, adapters = (sum(cost.num_bytes for cost in some) for some in (costs, lora))
    share, num_launches = lora_share_to_reach(costs), sum(cost.launches for cost in lora)
    spare = ", ".join(
        f"{1e6 * adapters / b * (1 / share - 1) / num_launches:.1f} on {gpu}" for gpu, b in BANDWIDTH.items()
    )
    return [
        f"{load.model.name}, {load.requests} requests, {load.adapters} adapters of rank {load.rank}, context",
        f"{load.context}, bf16: {total / 1e9:.2f} GB per step, {adapters / 1e9:.2f} GB of it for adapters.",
        f"By bytes alone, a step with adapters runs at {ratio(costs):.3f} of the speed without. To keep 95 % of that,",
        f"the {num_launches} LoRA launches together must reach {share:.2f} of the bandwidth of the other launches:",
        f"each may take this many µs more than its minimum time: {spare}.",
        "The share to reach for one kernel is 0.70 from 64 MB; below that, it allows 3 µs more than the minimum time.",
    ]
