"""Which adapters a run registers, and which one each request names."""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.errors import InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_dirs(directory: Path | None, count: int) -> list[Path]:
    """At most `count` adapters of a directory, by name; raises InputError when there is no directory or none in it."""
    if count == 0:
        return []
    if directory is None:
        raise InputError("adapters need --adapters DIR, a directory of PEFT directories")
    found = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
    if not found:
        raise InputError(f"{directory} holds no PEFT directories, which are asked for")
    return found[:count]


@contextlib.contextmanager
def copies(originals: Sequence[Path], count: int) -> Iterator[list[Path]]:
    """`count` adapters, each with a digest of its own: the given ones, then as many as are missing.

    A made one links to an original's weights and names another revision in its configuration. So a thousand cost
    kilobytes of disk, and each takes all its bytes in the pool; but files read a second time come from the page cache.
    """
    with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
        made = [
            _copy(originals[index % len(originals)], Path(scratch) / f"copy-{index}")
            for index in range(len(originals), count)
        ]
        yield [*originals, *made]


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
    """Each request draws one of all adapters, the one of rank k with a weight of 1 / k; every run draws anew."""
    weights = [1 / rank for rank in range(1, registered + 1)]
    return random.Random(f"zipf-{run}").choices(range(registered), weights, k=requests)
