"""The cost model of a decode step, against sums computed by hand."""

from dataclasses import replace

from engine.kernels.triton.measure.cost import (
    BANDWIDTH,
    EXAMPLE,
    LAUNCH_S,
    decode_step,
    fused_added_s,
    lora_share_to_reach,
    ratio,
    report,
)
from engine.kernels.triton.measure.shapes import LLAMA


def test_base_weights_match_the_model() -> None:
    base = [cost for cost in decode_step(EXAMPLE) if cost.name.startswith("linear")]
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096) + 128256 * 4096
    assert sum(cost.flops for cost in base) == 2 * 32 * weights
    assert 2 * weights < sum(cost.num_bytes for cost in base) < 2 * weights * 1.02


def test_adapters_match_the_layout() -> None:
    per_layer = 16 * (3 * 4096 + 6144 + 2 * 4096 + 2 * 4096 + 28672 + 14336 + 4096)
    adapters = 32 * 32 * per_layer
    lora = [cost for cost in decode_step(EXAMPLE) if cost.is_lora]
    assert sum(cost.flops for cost in lora) == 2 * adapters
    assert 2 * adapters < sum(cost.num_bytes for cost in lora) < 2 * adapters * 1.10
    assert len(lora) == 8
    assert {cost.launches for cost in lora} == {32}


def test_keys_and_values_are_read_once() -> None:
    attend = next(cost for cost in decode_step(EXAMPLE) if cost.name == "attend")
    kv = 32 * 32 * 1024 * 2 * 8 * 128 * 2
    assert kv < attend.num_bytes < kv * 1.03


def test_the_ratio_follows_from_the_bytes() -> None:
    short, long = (decode_step(replace(EXAMPLE, context=context)) for context in (1, 4096))
    assert 0.83 < ratio(short) < 0.86
    assert ratio(short) < ratio(long) < 1
    assert 0.6 < lora_share_to_reach(short) < lora_share_to_reach(decode_step(replace(EXAMPLE, rank=64))) < 1


def test_the_share_to_reach_decreases_with_the_size() -> None:
    costs = {cost.name: cost for cost in decode_step(EXAMPLE)}
    assert costs["linear gate_up"].share_to_reach(3.35e12) == 0.70
    assert costs["shrink qkv"].share_to_reach(4.8e12) < costs["shrink qkv"].share_to_reach(3.35e12) < 0.70


def test_the_report_has_a_row_for_every_kernel() -> None:
    text = report()
    assert all(f"| {cost.name} | {cost.launches} |" in text for cost in decode_step(EXAMPLE))
    assert LLAMA.name in text


def test_a_fused_shrink_and_expand_would_add_more_than_a_launch_saves() -> None:
    """The reason there is no fused kernel."""
    for group in LLAMA.groups:
        for bandwidth in BANDWIDTH.values():
            assert fused_added_s(EXAMPLE, group, bandwidth) > 2 * LAUNCH_S
    few, many = (replace(EXAMPLE, adapters=adapters, rank=8) for adapters in (1, 32))
    assert fused_added_s(few, "o", 3.35e12) < fused_added_s(many, "o", 3.35e12)
