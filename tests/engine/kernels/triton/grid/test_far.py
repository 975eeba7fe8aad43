"""A layer's pool with more than 2^31 values: addresses at its end do not wrap around at 2^32."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels import AttentionBatch, KvCache, LoraTables
from engine.kernels.memory import huge_zeros
from tests.engine.kernels.cases import Shapes, adapter_tables, lora_batch, random_matrix, sequences
from tests.engine.kernels.triton.grid.device import BF16, OnDevice

FAR_BYTES = 5 << 30


def moved_far(pool: Tensor, device: str) -> tuple[Tensor, int]:
    """(a one-layer pool with these pages at its end, the offset of their ids); untouched memory is not allocated."""
    layers, pages, page_bytes = pool.shape
    assert layers == 1
    count = FAR_BYTES // page_bytes
    assert count * page_bytes // BF16.itemsize > 2**31
    memory = huge_zeros(FAR_BYTES) if device == "cpu" else torch.zeros(FAR_BYTES, dtype=torch.uint8, device=device)
    far = memory[: count * page_bytes].view(1, count, page_bytes)
    far[0, count - pages :] = pool[0].to(device)
    return far, count - pages


def shifted(ids: Tensor, shift: int) -> Tensor:
    return torch.where(ids < 0, ids, ids + shift)


def test_adapters_at_the_end_of_a_large_pool(kernels: OnDevice) -> None:
    near = adapter_tables([(16, 0, 0, 8, 0, 0, 0), (0, 0, 0, 24, 0, 0, 0)], Shapes(64, 64, 64), BF16, num_layers=1)
    pool, shift = moved_far(near.pool, kernels.device)
    far = LoraTables(pool, shifted(near.adapter_pages, shift), near.parts, near.scales)
    x, y, expected = random_matrix(4, 64, BF16, 1), torch.zeros(4, 64, dtype=BF16), torch.zeros(4, 64, dtype=BF16)
    slots = [-1, 0, 0, 1]
    kernels.lora_apply(expected, x, (64,), lora_batch(near, slots), 0, 3)
    kernels.lora_apply(y, x, (64,), lora_batch(far, slots), 0, 3)
    assert expected[1:].abs().amin(dim=1).gt(0).all()
    assert torch.equal(y, expected)


def test_keys_and_values_at_the_end_of_a_large_pool(kernels: OnDevice) -> None:
    near = sequences([(20, 1), (0, 5)], BF16, num_layers=1)
    pool, shift = moved_far(near.kv.pool, kernels.device)
    batch = AttentionBatch(shifted(near.batch.block_tables, shift), near.batch.query_starts, near.batch.context_lens)
    far = replace(near, kv=KvCache(pool, near.kv.num_kv_heads, near.kv.head_dim), batch=batch)
    width = near.num_heads * near.kv.head_dim
    qkv = random_matrix(near.num_tokens, width + 2 * near.kv.num_kv_heads * near.kv.head_dim, BF16, 4)
    outputs = []
    for case in (near, far):
        rows, out = qkv.clone(), torch.zeros(near.num_tokens, width, dtype=BF16)
        kernels.rope_write_kv(rows, case.kv, 0, case.batch, case.num_heads, None, None, None, 1e-6)
        kernels.paged_attention(rows[:, :width], case.kv, 0, case.batch, case.num_heads, 0.1, out, 0)
        outputs.append(out)
    assert outputs[0].abs().amin(dim=1).gt(0).all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(pool[0, shift:].cpu(), near.kv.pool[0])
