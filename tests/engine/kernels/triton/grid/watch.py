"""Detects errors that the interpreter hides because it runs a launch's programs one after the other.

`watched` runs a kernel in the interpreter, records every memory access, and raises AssertionError if

- an address is outside the launch's tensors;
- two programs write the same address, or one reads an address that another writes: their order is undefined;
- a program loads an address after storing to it, or stores in a different order than it has loaded: its threads do
  not synchronize on global memory;
- a sum or product of 32-bit integers overflows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from engine.kernels.triton.launch import Launch, run

Addresses = npt.NDArray[np.uint64]
WRAPPING = {"create_add": np.add, "create_sub": np.subtract, "create_mul": np.multiply}


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the addresses of its unmasked lanes, in the block's order."""

    program: tuple[int, int, int]
    is_store: bool
    addresses: Addresses


class Watch:
    """The accesses of a launch, in the interpreter's order."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._accesses: list[Access] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Intercept the interpreter's loads, stores and integer arithmetic."""
        builder: Any = interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store
        wrapping = {name: getattr(builder, name) for name in WRAPPING}

        def recorded_load(pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
            self._record(pointers, mask, is_store=False)
            return load(pointers, mask, *rest)

        def recorded_store(pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
            self._record(pointers, mask, is_store=True)
            return store(pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = recorded_load, recorded_store
        for name, operator in wrapping.items():
            setattr(builder, name, self._checked(name, operator))
        try:
            yield
        finally:
            for name in ("create_masked_load", "create_masked_store", *wrapping):
                delattr(builder, name)

    def _record(self, pointers: TensorHandle, mask: TensorHandle, *, is_store: bool) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if len(addresses):
            self._accesses.append(Access(tuple(interpreter_builder.grid_idx), is_store, addresses))

    def _checked(self, name: str, operator: Any) -> Any:
        def checked(left: TensorHandle, right: TensorHandle) -> TensorHandle:
            result = operator(left, right)
            if left.data.dtype == right.data.dtype == np.int32:
                exact = WRAPPING[name](left.data.astype(np.int64), right.data.astype(np.int64))
                assert np.array_equal(result.data, exact), f"{self._launch.name}: {name} overflows 32 bits"
            return result

        return checked

    def check(self) -> None:
        """Raise an AssertionError that names the kernel, the programs and the argument."""
        if not self._accesses:
            return
        programs = {program: index for index, program in enumerate(dict.fromkeys(a.program for a in self._accesses))}
        sizes = [len(access.addresses) for access in self._accesses]
        addresses = np.concatenate([access.addresses for access in self._accesses])
        owners = np.repeat([programs[access.program] for access in self._accesses], sizes)
        stores = np.repeat([access.is_store for access in self._accesses], sizes)
        self._check_extents(addresses)
        self._check_apart(addresses, owners, stores, list(programs))
        for program in programs:
            self._check_own_order([access for access in self._accesses if access.program == program])

    def _check_extents(self, addresses: Addresses) -> None:
        inside = np.zeros(len(addresses), bool)
        for _, first, end in self._extents():
            inside |= (addresses >= first) & (addresses < end)
        outside = addresses[~inside]
        assert not len(outside), f"{self._launch.name} accesses memory outside its tensors: {self._name(outside[0])}"

    def _check_apart(
        self, addresses: Addresses, owners: npt.NDArray[Any], stores: npt.NDArray[Any], programs: list[Any]
    ) -> None:
        """Check that no program accesses an address that another writes."""
        touched = np.isin(addresses, np.unique(addresses[stores]))
        pairs = np.unique(np.stack([addresses[touched], owners[touched].astype(np.uint64)]), axis=1)
        shared = np.flatnonzero(pairs[0, 1:] == pairs[0, :-1])
        if len(shared):
            address, (one, other) = pairs[0, shared[0]], pairs[1, shared[0] : shared[0] + 2].astype(int)
            both = f"programs {programs[one]} and {programs[other]}"
            raise AssertionError(f"{self._launch.name}: {both} race at {self._name(address)}")

    def _check_own_order(self, accesses: list[Access]) -> None:
        stored = np.empty(0, np.uint64)
        for access in accesses:
            again = access.addresses[np.isin(access.addresses, stored)]
            if len(again) and not access.is_store:
                raise AssertionError(
                    f"{self._launch.name} loads an address after storing to it: {self._name(again[0])}"
                )
            if access.is_store:
                stored = np.union1d(stored, access.addresses)
        for store in (access for access in accesses if access.is_store):
            for loaded in (access.addresses for access in accesses if not access.is_store):
                both = loaded[np.isin(loaded, store.addresses)]
                if len(both):
                    kept = store.addresses[np.isin(store.addresses, both)]
                    in_order = len(kept) == len(both) and bool((kept == both).all())
                    where = self._name(both[0])
                    assert in_order, f"{self._launch.name} stores in a different order than it loads: {where}"

    def _extents(self) -> Iterator[tuple[str, int, int]]:
        """(argument, first byte, byte past its last) of the launch's tensors."""
        for name, value in zip(self._launch.kernel.arg_names, self._launch.arguments, strict=False):
            if isinstance(value, Tensor) and value.numel():
                last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
                first = value.data_ptr()
                yield name, first, first + (last + 1) * value.element_size()

    def _name(self, address: np.uint64) -> str:
        """The argument at or before an address, and the offset from it."""
        name, first = max(((name, first) for name, first, _ in self._extents() if first <= address), key=lambda e: e[1])
        return f"{name} + {int(address) - first} bytes"


def watched(launch: Launch) -> None:
    """Run a kernel in the interpreter and check its memory accesses."""
    watch = Watch(launch)
    with watch.recording():
        run(launch)
    watch.check()
