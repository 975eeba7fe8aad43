"""Memory for what is read at random places: without huge pages every tile costs a page table walk besides its read."""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def huge_zeros(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zero, aligned to a huge page and backed by huge pages where the kernel gives them.

    Memory is taken from the system when it is first touched, so a pool may be larger than what is used of it.
    """
    area = mmap.mmap(-1, max(num_bytes, 1) + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
