"""The adapters that a run loads, and the adapter of each request."""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.files.model_config import ModelConfig
from services.errors import InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (8, 16, 32, 64)
MAX_RANDOM = 64
STRENGTH = 0.02
"""Standard deviation of B's values; A's values preserve the scale of their input."""


@contextlib.contextmanager
def adapter_dirs(directory: Path | None, model: ModelConfig, count: int) -> Iterator[list[Path]]:
    """At most `count` adapters of a directory, by name; without a directory, at most MAX_RANDOM random ones.

    Raises InputError if the directory contains none.
    """
    if directory is not None and count:
        yield _found(directory, count)
    else:
        with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
            yield [_random(Path(scratch) / f"{index:02}", model, index) for index in range(min(count, MAX_RANDOM))]


def _random(to: Path, model: ModelConfig, index: int) -> Path:
    """A random adapter for all seven projections in bf16, of the next of RANKS; the same in every run."""
    rank, generator = RANKS[index % len(RANKS)], torch.Generator().manual_seed(index)
    hidden, inner, q, kv = model.hidden_size, model.intermediate_size, model.q_size, model.kv_size
    sizes = {
        **{f"self_attn.{name}_proj": (hidden, out) for name, out in (("q", q), ("k", kv), ("v", kv))},
        "self_attn.o_proj": (q, hidden),
        **{f"mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")},
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(model.num_layers):
        for module, (inputs, outputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
            tensors[f"{name}.lora_A.weight"] = (a * inputs**-0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (b * STRENGTH).bfloat16()
    to.mkdir()
    save_file(tensors, to / WEIGHTS)
    targets = [module.partition(".")[2] for module in sizes]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (to / CONFIG).write_text(json.dumps(described))
    return to


def _found(directory: Path, count: int) -> list[Path]:
    found = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
    if not found:
        raise InputError(f"{directory} contains no PEFT directories")
    return found[:count]


@contextlib.contextmanager
def copies(originals: Sequence[Path], count: int) -> Iterator[list[Path]]:
    """`count` adapters with different digests: the originals, then copies of them.

    A copy links to an original's weights and has another revision in its configuration. So a thousand copies need
    kilobytes of disk but their full size in the pool; their files are read from the page cache.
    """
    with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
        created = [
            _copy(originals[index % len(originals)], Path(scratch) / f"copy-{index}")
            for index in range(len(originals), count)
        ]
        yield [*originals, *created]


def _copy(original: Path, to: Path) -> Path:
    config = json.loads((original / CONFIG).read_bytes())
    to.mkdir()
    (to / CONFIG).write_text(json.dumps(config | {"revision": to.name}))
    (to / WEIGHTS).symlink_to((original / WEIGHTS).resolve())
    return to


def cycle(requests: int, distinct: int) -> list[int]:
    """Request i names adapter i modulo `distinct`."""
    return [index % distinct for index in range(requests)]


def zipf(requests: int, registered: int, run: int) -> list[int]:
    """Each request draws an adapter, the k-th with a weight of 1 / k; every run draws differently."""
    weights = [1 / rank for rank in range(1, registered + 1)]
    return random.Random(f"zipf-{run}").choices(range(registered), weights, k=requests)
