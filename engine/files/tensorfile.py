"""safetensors files without torch: header checked by the library, data as memory-mapped bits that cost no copy."""

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
    """The file is no readable safetensors file; the text says why."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file. `dtype` is safetensors' name of it: F32, F16, BF16, …"""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def bits(self, file: Bytes | None = None) -> Bits:
        """Its elements as unsigned integers of the same width, mapped copy-on-write; F32, F16 and BF16 only.

        Whoever reads many tensors of a file maps it once and gives it.
        """
        data = (map_file(self.path) if file is None else file)[self.offset : self.offset + self.num_bytes]
        bits: Bits = data.view(BITS[self.dtype]).reshape(self.shape)
        return bits

    def is_finite(self, file: Bytes | None = None) -> bool:
        """True when no element is NaN or infinite."""
        exponent = EXPONENT[self.dtype]
        return not bool(((self.bits(file) & exponent) == exponent).any())


def map_file(path: Path) -> Bytes:
    """A file's bytes, mapped copy-on-write for as long as something refers to them."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))  # slices of a memmap cost ten times a plain array's


def read_tensor_file(path: Path, max_header_bytes: int | None = None) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises TensorFileError when it is damaged or something else, or its header is longer than the caller can use: a
    header of hundreds of thousands of names takes seconds to parse.
    """
    _refuse_pickle(path)
    if max_header_bytes is not None:
        _refuse_long_header(path, max_header_bytes)
    try:
        with safe_open(str(path), framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise TensorFileError(f"{path} is truncated or no safetensors file ({error})") from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: _stored(path, entry, 8 + header_bytes) for name, entry in header.items()}


def _stored(path: Path, entry: Mapping[str, object], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]  # type: ignore[misc]  # the library has checked the header
    return StoredTensor(path, str(entry["dtype"]), tuple(entry["shape"]), data_start + start, end - start)  # type: ignore[arg-type, has-type]  # as above


def _refuse_long_header(path: Path, most: int) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if most < size <= path.stat().st_size:  # a longer one belongs to a truncated file
        raise TensorFileError(
            f"{path} has a header of {size} bytes, where {most} are enough for every tensor that can belong here; "
            "save only the adapter's tensors, and less metadata"
        )


def _refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(9)
    # A safetensors header may happen to be as long as a pickle's first bytes read as a number: then "{" follows.
    if head[8:] != b"{" and (head[:2] == b"PK" or head[:1] == b"\x80"):
        raise TensorFileError(f"{path} is a pickle under the name of a safetensors file; save it as safetensors")
