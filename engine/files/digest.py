"""Content digests: hex SHA-256 over files, each preceded by the lengths of its name and content."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from engine.errors import AdapterError, ModelError

CHUNK_BYTES = 1024**2

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def adapter_digest(peft_dir: Path) -> str:
    """Digest of an adapter's configuration and weights. Raises AdapterError naming a missing file."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (peft_dir / name).is_file():
            raise AdapterError(
                f"{peft_dir / name} does not exist; an adapter needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
            )
    return framed_digest(peft_dir, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def model_fingerprint(model_dir: Path) -> str:
    """Digest of a base model's config.json, tokenizer.json and weight files; each call reads them in full.

    Raises ModelError naming a missing file.
    """
    names = ("config.json", "tokenizer.json", *weight_files(model_dir))
    for name in names:
        if not (model_dir / name).is_file():
            raise ModelError(
                f"{model_dir / name} does not exist; the base model must be a complete Hugging Face directory"
            )
    return framed_digest(model_dir, names)


def weight_files(model_dir: Path) -> tuple[str, ...]:
    """Names of the base model's safetensors files, sorted. Raises ModelError if there are none."""
    if (model_dir / SINGLE_WEIGHTS).is_file():
        return (SINGLE_WEIGHTS,)
    index = model_dir / WEIGHTS_INDEX
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
    except FileNotFoundError as error:
        raise ModelError(f"{model_dir} contains neither {SINGLE_WEIGHTS} nor {WEIGHTS_INDEX}") from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a valid weights index: {error}") from error
    return tuple(sorted({str(shard) for shard in shards}))


def framed_digest(directory: Path, names: Iterable[str]) -> str:
    """Hex SHA-256 over the named files: 8-byte name length, name, 8-byte content length and content of each."""
    digest = hashlib.sha256()
    for name in names:
        encoded, path = name.encode(), directory / name
        digest.update(len(encoded).to_bytes(8, "big") + encoded + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
