"""A checked, hashed and laid-out PEFT directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.errors import AdapterError
from engine.files.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.files.model_config import ModelConfig
from engine.lora.layout import AdapterLayout, build_layout, write_adapter
from engine.lora.peft import read_adapter
from engine.types import AdapterInfo, AdapterName, PageId

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """What any engine needs to admit an adapter without reading a file.

    `info` has the directory's name and the size of the stored weights. `signature` identifies the checked files.
    """

    info: AdapterInfo
    directory: Path
    signature: Signature
    layout: AdapterLayout

    def write(self, name: AdapterName, tiles: Tensor, pages: Sequence[PageId]) -> None:
        """Write the weights into pages (see `write_adapter`); raises AdapterError if the files have changed."""
        try:
            if _signature(self.directory) != self.signature:
                raise AdapterError(f"the files of adapter {name!r} in {self.directory} have changed; load it again")
            write_adapter(self.layout, self.directory / ADAPTER_WEIGHTS, tiles, pages)
        except (OSError, ValueError) as error:
            raise AdapterError(f"adapter {name!r} cannot be read from {self.directory}: {error}") from error


def check(directory: Path, model: ModelConfig) -> CheckedAdapter:
    """Read, check and hash a directory. Raises AdapterError naming the file, field or tensor at fault, or OSError.

    Thread-safe: it depends only on the files and the model's frozen configuration.
    """
    signature = _signature(directory)
    adapter = read_adapter(directory, model)
    return CheckedAdapter(adapter.info, directory, signature, build_layout(adapter, model))


def _signature(directory: Path) -> Signature:
    """Inode, size and modification time of the files, which change when a file is replaced or written."""
    try:
        found = [(directory / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except OSError:
        return ()
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
