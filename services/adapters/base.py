"""The base model as the registry identifies it: its fingerprint and the names that adapters may use for it."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import ModelError, model_fingerprint, read_model_config
from services.errors import ConfigError, MissingSettingError
from services.process.settings import Settings

FINGERPRINTED_SUFFIXES = (".json", ".safetensors")


@dataclass(frozen=True)
class BaseModel:
    """A checked base model. `names` are the last parts of its names, in lower case."""

    directory: Path
    fingerprint: str
    names: frozenset[str]

    def remark_on(self, named: str | None) -> str | None:
        """A remark for an adapter that fits but names a different base model; None if there is nothing to remark."""
        if named is None or _last_part(named) in self.names:
            return None
        return (
            f"The adapter's shapes fit, but it names the base model {named!r} and this pool serves "
            f"{self.directory.name}; check that it was trained for this model."
        )


def load_base(settings: Settings) -> BaseModel:
    """Check LORAQ_BASE_MODEL and compute its fingerprint. Blocks; the first call reads every byte."""
    if settings.base_model is None:
        raise MissingSettingError("LORAQ_BASE_MODEL is not set; set it to the Hugging Face directory of the base model")
    directory = settings.base_model.resolve()
    try:
        read_model_config(directory)
        fingerprint = _cached_fingerprint(directory, settings.cache_dir / "fingerprints")
    except ModelError as error:
        raise ConfigError(f"LORAQ_BASE_MODEL: {error}") from error
    named = json.loads((directory / "config.json").read_bytes()).get("_name_or_path") or ""
    return BaseModel(directory, fingerprint, frozenset({_last_part(directory.name), _last_part(named)}) - {""})


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _cached_fingerprint(directory: Path, cache: Path) -> str:
    """Computed again whenever the name, size or modification time of a file has changed since the last call."""
    entry = cache / f"{hashlib.sha256(str(directory).encode()).hexdigest()}.json"
    state = _state(directory)
    known = _read(entry)
    if known.get("state") == state:
        return str(known["fingerprint"])
    fingerprint = model_fingerprint(directory)
    _write(entry, {"state": state, "fingerprint": fingerprint})
    return fingerprint


def _state(directory: Path) -> list[list[Any]]:
    files = sorted(path for path in directory.iterdir() if path.suffix in FINGERPRINTED_SUFFIXES)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _read(entry: Path) -> dict[str, Any]:
    try:
        known = json.loads(entry.read_bytes())
    except (OSError, ValueError):
        return {}  # an unreadable entry is computed again
    return known if isinstance(known, dict) and "fingerprint" in known else {}


def _write(entry: Path, content: dict[str, Any]) -> None:
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        os.replace(temporary, entry)
    except OSError as error:
        raise ConfigError(f"LORAQ_CACHE_DIR: cannot write {entry}: {error.strerror}") from error
