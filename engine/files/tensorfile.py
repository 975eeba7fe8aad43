"""Reads safetensors files without torch: the library checks the header, the data is memory-mapped without a copy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

BITS: dict[str, str] = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}
EXPONENT: dict[str, int] = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


class TensorFileError(Exception):
    """The file is not a readable safetensors file; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in its file. `dtype` is safetensors' name for its type: F32, F16, BF16, …"""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def bits(self, file: Bytes | None = None) -> Bits:
        """Its elements as unsigned integers of the same width, mapped copy-on-write; F32, F16 and BF16 only.

        To read many tensors of one file, map it once with `map_file` and pass the mapping.
        """
        data = (map_file(self.path) if file is None else file)[self.offset : self.offset + self.num_bytes]
        bits: Bits = data.view(BITS[self.dtype]).reshape(self.shape)
        return bits

    def is_finite(self, file: Bytes | None = None) -> bool:
        """True when no element is NaN or infinite."""
        exponent = EXPONENT[self.dtype]
        return not bool(((self.bits(file) & exponent) == exponent).any())


def map_file(path: Path) -> Bytes:
    """A file's bytes, mapped copy-on-write; the mapping lives as long as a reference to it."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))  # slicing a memmap costs ten times as much


def read_tensor_file(path: Path, max_header_bytes: int | None = None) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises TensorFileError if the file is damaged, is not a safetensors file, or has a header over `max_header_bytes`: a
    header with hundreds of thousands of names takes seconds to parse.
    """
    _refuse_pickle(path)
    if max_header_bytes is not None:
        _refuse_long_header(path, max_header_bytes)
    try:
        with safe_open(str(path), framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise TensorFileError(f"{path} is truncated or not a safetensors file ({error})") from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: _stored(path, entry, 8 + header_bytes) for name, entry in header.items()}


def _stored(path: Path, entry: Mapping[str, object], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]  # type: ignore[misc]  # the library has checked the header
    return StoredTensor(path, str(entry["dtype"]), tuple(entry["shape"]), data_start + start, end - start)  # type: ignore[arg-type, has-type]  # as above


def _refuse_long_header(path: Path, max_bytes: int) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if max_bytes < size <= path.stat().st_size:  # a longer header means a truncated file, which safetensors reports
        raise TensorFileError(
            f"{path} has a header of {size} bytes, but at most {max_bytes} are allowed; save only the adapter's "
            "tensors and less metadata"
        )


def _refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(9)
    # The length of a safetensors header can look like the first bytes of a pickle; then "{" follows it.
    if head[8:] != b"{" and (head[:2] == b"PK" or head[:1] == b"\x80"):
        raise TensorFileError(f"{path} is a pickle, not a safetensors file; save the tensors as safetensors")
