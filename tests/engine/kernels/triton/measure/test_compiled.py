"""Properties of the compiled launches, read from machine code; needs no GPU.

By default only the launches with a product, for Llama-3-8B; `make kernels-compiled` covers the whole table.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels.triton import TritonKernels
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.measure import compiled
from engine.kernels.triton.measure.compiled import (
    Facts,
    Read,
    compile_launch,
    read,
    read_all,
    table,
    variant_of,
    variants,
    write_section,
)
from engine.kernels.triton.measure.shapes import MODELS, WITH_DOT, launches
from engine.kernels.triton.table import (
    ARCHITECTURES,
    ATTENTION,
    EXPAND,
    LINEAR,
    SHRINK,
    Architecture,
    phase,
    row_architecture,
    width,
)
from tests.engine.kernels.triton.grid.device import FULL

KERNEL = re.compile(r"^@triton\.jit.*\ndef (\w+)\(", re.MULTILINE)
IN_EVERY_STEP = WITH_DOT[:3]
_, LLAMA, QWEN = MODELS


def first(name: str, started: list[Launch]) -> Launch:
    return next(launch for launch in started if launch.name == name)


def some(architecture: Architecture) -> Iterator[tuple[str, Launch]]:
    """The first launch of every kernel with a product; Qwen's groups of seven heads; fp16's different expand."""
    for step in ("decode", "prefill"):
        started = launches(LLAMA, architecture, step)
        for name in IN_EVERY_STEP:
            yield step, first(name, started)
    invariant = launches(LLAMA, architecture, "invariant")
    for name in ("attend", "linear"):
        yield "invariant", first(name, invariant)
    yield "prefill", first("attend", launches(QWEN, architecture, "prefill"))
    yield "decode", first("expand", launches(LLAMA, architecture, "decode", torch.float16))


def read_some() -> Iterator[Read]:
    for architecture in ARCHITECTURES:
        for step, launch in some(architecture):
            yield step, architecture, launch, read(launch, architecture)


def test_nothing_spills_weights_are_read_16_bytes_at_a_time_and_products_use_tensor_cores() -> None:
    found = read_all() if FULL else read_some()
    for step, architecture, launch, facts in found:
        where = f"sm_{architecture} {step} {launch.name} {dict(launch.constants)}: {facts}"
        assert facts.spills == 0, where
        assert facts.occupancy > 0, where
        if launch.name in WITH_DOT:
            assert facts.weight_loads == {16}, where
            assert facts.tensor_core, where


@pytest.mark.parametrize("architecture", ARCHITECTURES if FULL else ARCHITECTURES[:1])
def test_float32_compiles_and_fits(architecture: Architecture) -> None:
    """It is for exact results, on CUDA cores; there is no target for its speed."""
    for step in ("decode", "prefill"):
        started = launches(MODELS[0], architecture, step, torch.float32)
        for name in IN_EVERY_STEP:
            facts = read(first(name, started), architecture)
            assert facts.occupancy > 0
            assert facts.weight_loads == {16}


BLOCKED = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], warpsPerCTA = \[(.*?)\]"
)
ACCESS = re.compile(r"tt\.(load|store) .*tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>")


def changed_in_place(architecture: Architecture) -> Iterator[Launch]:
    """Every kernel that stores to addresses it has loaded, with the narrowest blocks where block sizes vary."""
    for step in ("decode", "prefill"):
        yield first("expand", launches(LLAMA, architecture, step))
    yield first("rope_write_kv", launches(LLAMA, architecture, "decode"))
    started: list[Launch] = []
    rows, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 64), (64,)))
    TritonKernels(started.append, architecture).rms_norm(rows, weight, 1e-5, rows.clone(), rows.clone())
    yield from started


@pytest.mark.parametrize("architecture", ARCHITECTURES if FULL else ARCHITECTURES[:1])
def test_values_changed_in_place_are_loaded_by_one_thread(architecture: Architecture) -> None:
    """Otherwise a late thread could load what another has already stored."""
    for launch in changed_in_place(architecture):
        code = compile_launch(launch, architecture).asm["ttgir"]
        covered = {name: product_of(", ".join(sizes), ", ") for name, *sizes in BLOCKED.findall(code)}
        found = ACCESS.findall(code)
        stored = {shape for what, shape, _ in found if what == "store"}
        loaded = [(shape, layout) for what, shape, layout in found if what == "load" and shape in stored]
        assert loaded
        for shape, layout in loaded:
            assert covered[layout] <= product_of(shape, "x"), (launch.name, shape)


def product_of(numbers: str, between: str) -> int:
    return math.prod(int(number) for number in numbers.split(between))


@pytest.mark.parametrize("architecture", ARCHITECTURES if FULL else ARCHITECTURES[:1])
def test_a_mixed_step_needs_no_additional_variants(architecture: Architecture) -> None:
    """So everything can be compiled ahead of time."""
    for model in MODELS:
        known = {variant_of(x) for step in ("decode", "prefill") for x in launches(model, architecture, step)}
        mixed = launches(model, architecture, "mixed")
        assert [launch.name for launch in mixed].count("attend") == 2
        assert {variant_of(launch) for launch in mixed} <= known


def test_every_row_of_the_table_is_compiled() -> None:
    """No row is for a case that never occurs in the models' steps."""
    for architecture in ARCHITECTURES:
        every = variants(architecture)
        layers = {(step, launch.name): launch for step, launch in reversed(every)}
        for step in ("decode", "prefill", "invariant"):
            assert layers[step, "expand"].constants["BLOCK_M"] == EXPAND[step, architecture].block_m
            assert layers[step, "attend"].constants["PARTITION"] == ATTENTION[step, architecture].partition
            wanted = {SHRINK[step, w, architecture].split_k for w in ("narrow", "wide")}
            found = {x.constants["SPLIT_K"] for s, x in every if (s, x.name) == (step, "shrink")}
            assert wanted <= found
        blocks = LINEAR[architecture]
        sizes = [layers["invariant", "linear"].constants[f"BLOCK_{side}"] for side in "MNK"]
        assert sizes == [blocks.block_m, blocks.block_n, blocks.block_k]


def test_every_kernel_is_compiled() -> None:
    """On its own, or inlined into its callers."""
    sources = [path.read_text() for path in Path(compiled.__file__).parents[1].glob("*.py")]
    kernels = {name for text in sources for name in KERNEL.findall(text)}
    called = {"load_tiles", "dot_narrow", "dot_exact", "dot_shares", "rounded", "norm_weight"}
    assert {launch.name for _, launch in variants(90)} == kernels - called


def test_the_invariant_product_is_compiled_with_a_bias_and_for_logits() -> None:
    found = [launch for _, launch in variants(90) if launch.name == "linear"]
    assert {launch.constants["HAS_BIAS"] for launch in found} == {False, True}
    assert {launch.arguments[3].dtype for launch in found} == {torch.bfloat16, torch.float32}


def test_shape_classes() -> None:
    assert [row_architecture(c) for c in (80, 86, 89, 90, 100, 120)] == [80, 80, 80, 90, 100, 100]
    with pytest.raises(AssertionError, match=r"7\.5 is too old"):
        row_architecture(75)
    assert phase(32, 32) == phase(33, 5) == "decode"
    assert phase(2048, 32) == phase(17, 1) == "prefill"
    assert (width(576), width(4096)) == ("narrow", "wide")
    blocks = EXPAND["decode", 90]
    assert (blocks.tiles_of(torch.bfloat16), blocks.tiles_of(torch.float16)) == (blocks.tiles_n, 2)


def test_the_table_shows_the_worst_of_all_shapes() -> None:
    launch = launches(LLAMA, 90, "decode")[0]
    facts = [Facts(40, 0, 512, 0.5, frozenset({16}), "HMMA.16816"), Facts(80, 2, 256, 0.25, frozenset({4}), "")]
    text = table(("decode", 90, launch, one) for one in facts)
    assert text.splitlines()[2] == "| embed | decode | 90 | 2 | 4 | 80 | 2 | 512 | 0.25 | 4 B, 16 B | HMMA |"


def test_a_section_is_replaced_between_its_markers(tmp_path: Path) -> None:
    document = tmp_path / "kernels.md"
    document.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n")
    write_section(document, "x", "new")
    assert document.read_text() == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n"
