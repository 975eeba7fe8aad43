"""A PEFT directory, checked, hashed and laid out: all that must be read to know an adapter."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.errors import AdapterError
from engine.files.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.files.model_config import ModelConfig
from engine.lora.layout import AdapterLayout, lay_out, write_adapter
from engine.lora.peft import read_adapter
from engine.types import AdapterInfo, AdapterName, PageId

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """What an engine needs to admit an adapter without reading a file; nothing of an engine is in it.

    `info` has the directory's name and the size of the weights as stored, `signature` is that of the checked files.
    """

    info: AdapterInfo
    directory: Path
    signature: Signature
    layout: AdapterLayout

    def write(self, name: AdapterName, tiles: Tensor, pages: Sequence[PageId]) -> None:
        """Lay the files out in pages, as `write_adapter`; raises AdapterError when they are not those of the check."""
        try:
            if _signature(self.directory) != self.signature:
                raise AdapterError(f"the files of adapter {name!r} in {self.directory} have changed; load it again")
            write_adapter(self.layout, self.directory / ADAPTER_WEIGHTS, tiles, pages)
        except (OSError, ValueError) as error:
            raise AdapterError(f"adapter {name!r} cannot be read from {self.directory}: {error}") from error


def check(directory: Path, model: ModelConfig) -> CheckedAdapter:
    """Read, check and hash a directory. Raises AdapterError naming the file, field or tensor at fault, and OSError.

    A function of the files and of the model's configuration, which is frozen: any thread may call it at any time.
    """
    signature = _signature(directory)
    adapter = read_adapter(directory, model)
    return CheckedAdapter(adapter.info, directory, signature, lay_out(adapter, model))


def _signature(directory: Path) -> Signature:
    """Tells whether a file was replaced or written since, without reading it."""
    try:
        found = [(directory / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except OSError:
        return ()
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
