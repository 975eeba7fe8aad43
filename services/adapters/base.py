"""The base model as the registry knows it: its fingerprint, and the names that adapters may call it by."""

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
    """A checked base model. `names` are the last parts, in lower case, of what it is called."""

    directory: Path
    fingerprint: str
    names: frozenset[str]

    def remark_on(self, named: str | None) -> str | None:
        """A remark if an adapter that fits names another base model than this."""
        if named is None or _last_part(named) in self.names:
            return None
        return (
            f"Its shapes fit, but it names the base model {named!r} while this pool serves {self.directory.name}; "
            "check that it was trained for this one."
        )


def load_base(settings: Settings) -> BaseModel:
    """Check LORAQ_BASE_MODEL and compute its fingerprint (blocking: reads every byte the first time)."""
    if settings.base_model is None:
        raise MissingSettingError(
            "LORAQ_BASE_MODEL is not set; it must be the Hugging Face directory of the base model"
        )
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
    """Computed again whenever a file's name, size or time of change differs from what was seen last."""
    note = cache / f"{hashlib.sha256(str(directory).encode()).hexdigest()}.json"
    state = _state(directory)
    known = _read(note)
    if known.get("state") == state:
        return str(known["fingerprint"])
    fingerprint = model_fingerprint(directory)
    _write(note, {"state": state, "fingerprint": fingerprint})
    return fingerprint


def _state(directory: Path) -> list[list[Any]]:
    files = sorted(path for path in directory.iterdir() if path.suffix in FINGERPRINTED_SUFFIXES)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _read(note: Path) -> dict[str, Any]:
    try:
        known = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return {}  # a cache: what cannot be read is computed
    return known if isinstance(known, dict) and "fingerprint" in known else {}


def _write(note: Path, content: dict[str, Any]) -> None:
    temporary = note.with_name(f".{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        os.replace(temporary, note)
    except OSError as error:
        raise ConfigError(f"LORAQ_CACHE_DIR: cannot write {note}: {error.strerror}") from error
