"""Properties of every compiled launch, read from PTX and machine code; needs no GPU.

`python -m engine.kernels.triton.measure.compiled` compiles all launches of the table for all architectures and writes
the results to docs/kernels.md.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from engine.kernels.triton.launch import COMPILER, Argument, Launch
from engine.kernels.triton.measure.cost import report
from engine.kernels.triton.measure.shapes import all_launches
from engine.kernels.triton.table import ARCHITECTURES, Architecture

HERE = Path(__file__).parents[1]
DOCUMENT = Path("docs/kernels.md")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
WEIGHT_LOADS = (
    ("tiles.py", "values = tl.load("),
    ("attention.py", "keys = tl.load("),
    ("attention.py", "values = tl.load("),
    ("linear.py", "w = tl.load("),
)
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b[.\w]*")
PTX_LOAD = re.compile(
    r"ld\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bfus](\d+)\s|cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (\w+)"
)
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
REGISTERS_PER_SM = 65536
WARPS_PER_SM = 64
BLOCKS_PER_SM = 32
WIDE_LOAD = 16


@dataclass(frozen=True)
class Facts:
    """Properties of a compiled kernel, per thread, block or multiprocessor. `weight_loads`: bytes per instruction."""

    registers: int
    spills: int
    shared_bytes: int
    occupancy: float
    weight_loads: frozenset[int]
    tensor_core: str


Read = tuple[str, Architecture, Launch, Facts]
"""(phase, architecture, launch, facts) of a compiled launch."""


def compile_launch(launch: Launch, architecture: Architecture) -> Any:
    """Triton's compiled kernel, specialised as in a real launch."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[str | int]]] = {}
    for index, (name, kind, is_divisible) in enumerate(_specialised(launch)):
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = launch.arguments[index]
        elif is_divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {**COMPILER, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _specialised(launch: Launch) -> Iterator[tuple[str, str, bool]]:
    """(name, type, whether it is a multiple of 16) of each argument in Triton's terms: 1 and None are constants."""
    free = _unspecialised(launch.kernel)
    for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=False):
        constant = value is None or (isinstance(value, int) and value == 1 and name not in free)
        yield name, "constexpr" if constant else _type(value), name not in free and not constant and _divisible(value)


def _unspecialised(kernel: Any) -> set[str]:
    """Arguments that are not specialised; an interpreted kernel has them in the decorator's arguments."""
    if isinstance(kernel, InterpretedFunction):
        return set(kernel.kwargs["do_not_specialize"] or ())
    return {p.name for p in kernel.params if p.do_not_specialize}


def _type(value: Argument) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _divisible(value: Argument) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def read(launch: Launch, architecture: Architecture) -> Facts:
    """Compile a launch and read its machine code."""
    kernel = compile_launch(launch, architecture)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = _cuobjdump(cubin, "-res-usage"), _cuobjdump(cubin, "-sass")
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    shared = int(kernel.metadata.shared)
    tensor_core = TENSOR_CORE.search(code)
    return Facts(
        registers=registers,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        shared_bytes=shared,
        occupancy=occupancy(registers, shared, launch.num_warps, architecture),
        weight_loads=frozenset(_weight_loads(kernel.asm["ptx"])),
        tensor_core=tensor_core[0] if tensor_core else "",
    )


def _cuobjdump(cubin: Path, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([str(tool), what, str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def occupancy(registers: int, shared_bytes: int, num_warps: int, architecture: Architecture) -> float:
    """Share of a multiprocessor's warps that can be resident: a warp allocates registers by 256, a block 1 KiB."""
    by_registers = REGISTERS_PER_SM // (-(-registers * 32 // 256) * 256 * num_warps)
    by_shared = SHARED_PER_SM[architecture] // (shared_bytes + 1024)
    return min(by_registers, by_shared, WARPS_PER_SM // num_warps, BLOCKS_PER_SM) * num_warps / WARPS_PER_SM


def _weight_loads(ptx: str) -> Iterator[int]:
    """Bytes of every global load from a source line that reads adapters, KV or weights."""
    wanted = set(_weight_lines())
    files = {number: Path(name).name for number, name in re.findall(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', ptx)}
    place: tuple[str, int] = ("", 0)
    for line in ptx.splitlines():
        if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = files.get(found[1], ""), int(found[2])
        elif place in wanted and (load := PTX_LOAD.search(line)):
            vector, bits, copied = load.groups()
            yield int(copied, 0) if copied else int(vector or 1) * int(bits) // 8


def _weight_lines() -> Iterator[tuple[str, int]]:
    for name, text in WEIGHT_LOADS:
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1):
            if text in line:
                yield name, number


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch per compiled variant."""
    found: dict[tuple[object, ...], Launch] = {}
    for launch in launches:
        found.setdefault(variant_of(launch), launch)
    return list(found.values())


def variant_of(launch: Launch) -> tuple[object, ...]:
    """The key of a compiled variant: launches with the same key share one compiled kernel."""
    arguments = tuple(_specialised(launch))
    return launch.name, arguments, tuple(launch.constants.items()), launch.num_warps, launch.num_stages


def table(found: Iterable[Read]) -> str:
    """One Markdown row per kernel, phase and architecture: the worst over the shapes of all models."""
    rows: dict[tuple[str, str, Architecture], list[tuple[Launch, Facts]]] = defaultdict(list)
    for phase, architecture, launch, facts in found:
        rows[launch.name, phase, architecture].append((launch, facts))
    lines = [
        "| kernel | phase | sm | variants | warps | registers | spills | shared | occupancy | weight loads | dot |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for (name, phase, architecture), compiled in sorted(rows.items(), key=lambda row: row[0]):
        every = [facts for _, facts in compiled]
        loads = sorted({size for facts in every for size in facts.weight_loads})
        products = sorted({facts.tensor_core.split(".")[0] for facts in every if facts.tensor_core})
        cells = (
            *(name, phase, architecture, len(every), compiled[0][0].num_warps, max(f.registers for f in every)),
            *(max(f.spills for f in every), max(f.shared_bytes for f in every)),
            *(f"{min(f.occupancy for f in every):.2f}", ", ".join(f"{size} B" for size in loads), ", ".join(products)),
        )
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def variants(architecture: Architecture) -> list[tuple[str, Launch]]:
    """(phase, launch) of all variants of the models' steps on an architecture."""
    by_phase: dict[str, list[Launch]] = defaultdict(list)
    for phase, launch in all_launches(architecture):
        by_phase[phase].append(launch)
    return [(phase, launch) for phase, some in by_phase.items() for launch in distinct(some)]


def _read_variant(place: tuple[Architecture, int]) -> Facts:
    architecture, index = place
    return read(variants(architecture)[index][1], architecture)


def read_all() -> Iterator[Read]:
    """Every variant for every architecture, with one process per core, as the compiler is single-threaded."""
    every = [(a, i, *found) for a in ARCHITECTURES for i, found in enumerate(variants(a))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        facts = processes.map(_read_variant, [(a, i) for a, i, _, _ in every])
        for (architecture, _, phase, launch), read_facts in zip(every, facts, strict=True):
            yield phase, architecture, launch, read_facts


def _logged(found: Iterable[Read]) -> Iterator[Read]:
    for phase, architecture, launch, facts in found:
        sys.stderr.write(f"sm_{architecture} {phase} {launch.name}: {facts}\n")
        yield phase, architecture, launch, facts


def write_section(document: Path, name: str, text: str) -> None:
    """Replace the text between a section's markers."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = document.read_text().split(begin)
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    """Compile everything and update docs/kernels.md."""
    write_section(DOCUMENT, "cost", report())
    source = f"Triton {triton.__version__}, bf16 or as named, `python -m engine.kernels.triton.measure.compiled`"
    write_section(DOCUMENT, "compiled", f"{source}\n\n{table(_logged(read_all()))}")


if __name__ == "__main__":
    main()
