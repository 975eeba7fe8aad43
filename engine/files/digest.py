"""Identity of content: hex SHA-256 over files, each framed by the length of its name and of its content."""

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
    """Identity of an adapter: its configuration and its weights. Raises AdapterError naming a missing file."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (peft_dir / name).is_file():
            raise AdapterError(
                f"{peft_dir / name} does not exist; an adapter has {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
            )
    return framed_digest(peft_dir, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def model_fingerprint(model_dir: Path) -> str:
    """Identity of a base model: config.json, tokenizer.json and every weight file, read in full at each call."""
    names = ("config.json", "tokenizer.json", *weight_files(model_dir))
    for name in names:
        if not (model_dir / name).is_file():
            raise ModelError(
                f"{model_dir / name} does not exist; the base model must be a complete Hugging Face directory"
            )
    return framed_digest(model_dir, names)


def weight_files(model_dir: Path) -> tuple[str, ...]:
    """Names of the base model's safetensors files, sorted. Raises ModelError when there are none."""
    if (model_dir / SINGLE_WEIGHTS).is_file():
        return (SINGLE_WEIGHTS,)
    index = model_dir / WEIGHTS_INDEX
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
    except FileNotFoundError as error:
        raise ModelError(f"{model_dir} holds neither {SINGLE_WEIGHTS} nor {WEIGHTS_INDEX}") from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weight files: {error}") from error
    return tuple(sorted({str(shard) for shard in shards}))


def framed_digest(directory: Path, names: Iterable[str]) -> str:
    """Hex SHA-256 over the named files: for each 8 bytes of name length, name, 8 bytes of content length, content."""
    digest = hashlib.sha256()
    for name in names:
        encoded, path = name.encode(), directory / name
        digest.update(len(encoded).to_bytes(8, "big") + encoded + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
