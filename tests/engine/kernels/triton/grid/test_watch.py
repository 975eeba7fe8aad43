"""The access check detects kernels that are correct in the interpreter and wrong on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import Launch
from tests.engine.kernels.triton.grid.device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the access check needs the interpreter")


@triton.jit
def shift(x, y, size, DISTANCE: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n + DISTANCE, mask=n < size)
    tl.store(y + n, values, mask=n < size)


@triton.jit
def reverse(x, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    values = tl.load(x + BLOCK - 1 - n)
    tl.store(x + n, values)


@triton.jit
def twice(x, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(x + n, tl.load(x + n) + 1.0)
    tl.store(x + n, tl.load(x + n) * 2.0)


@triton.jit
def far(x, stride, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(x + n * 0, (n * stride).to(tl.float32))


def start(kernel: object, *arguments: torch.Tensor | int, programs: int = 1, **constants: int) -> None:
    from tests.engine.kernels.triton.grid.watch import watched

    watched(Launch(kernel, (programs,), arguments, constants))


def test_programs_without_shared_addresses_pass() -> None:
    x, y = torch.arange(20.0), torch.zeros(20)
    start(shift, x, y, 20, programs=2, DISTANCE=0, BLOCK=16)
    assert torch.equal(x, y)
    start(shift, y, y, 20, programs=2, DISTANCE=0, BLOCK=16)
    assert torch.equal(x, y)


def test_a_program_that_reads_an_address_that_another_writes_is_reported() -> None:
    x = torch.zeros(32)
    with pytest.raises(AssertionError, match=r"shift: programs \(0, 0, 0\) and \(1, 0, 0\) race at x \+ 64 bytes"):
        start(shift, x, x, 30, programs=2, DISTANCE=2, BLOCK=16)


def test_programs_that_write_the_same_address_are_reported() -> None:
    x, y = torch.zeros(8), torch.zeros(9)
    with pytest.raises(AssertionError, match=r"far: programs .* race at x \+ 0 bytes"):
        start(far, x, 1, programs=2, BLOCK=8)
    with pytest.raises(AssertionError, match=r"shift accesses memory outside its tensors: x \+ 32 bytes"):
        start(shift, x, y, 9, DISTANCE=0, BLOCK=16)


def test_races_between_threads_of_one_program_are_reported() -> None:
    with pytest.raises(AssertionError, match=r"reverse stores in a different order than it loads: x \+"):
        start(reverse, torch.arange(8.0), BLOCK=8)
    with pytest.raises(AssertionError, match=r"twice loads an address after storing to it: x \+ 0 bytes"):
        start(twice, torch.arange(8.0), BLOCK=8)


def test_integer_overflow_is_reported() -> None:
    start(far, torch.zeros(1), 2**28, BLOCK=8)
    with pytest.raises(Exception, match="far: create_mul overflows 32 bits"):
        start(far, torch.zeros(1), 2**28 + 2**26, BLOCK=8)
