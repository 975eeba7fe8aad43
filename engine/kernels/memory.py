"""Memory for random access: without huge pages, every tile costs a page table walk in addition to its read."""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def huge_zeros(num_bytes: int) -> Tensor:
    """Zeroed uint8 [num_bytes], aligned to a huge page and backed by huge pages where the operating system allows it.

    Memory is allocated when it is first touched, so a pool may be larger than the part in use.
    """
    area = mmap.mmap(-1, max(num_bytes, 1) + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
