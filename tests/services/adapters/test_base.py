"""The base model's fingerprint is computed once per content; names are compared by their last part."""

import json
from pathlib import Path

import pytest

from engine import model_fingerprint
from services.adapters.base import BaseModel, load_base
from services.errors import ConfigError
from services.process.settings import Settings
from tests.builders import tiny_llama


@pytest.fixture
def own_base(tmp_path: Path) -> Settings:
    """Settings with a base model that the test may change."""
    return Settings(_env_file=None, base_model=tiny_llama(tmp_path / "Tiny-Llama"), cache_dir=tmp_path / "cache")


def test_the_fingerprint_is_computed_once_until_a_file_changes(
    own_base: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def counted(directory: Path) -> str:
        calls.append(directory)
        return model_fingerprint(directory)

    monkeypatch.setattr("services.adapters.base.model_fingerprint", counted)
    first = load_base(own_base).fingerprint
    assert load_base(own_base).fingerprint == first
    assert len(calls) == 1
    assert own_base.base_model is not None
    tiny_llama(own_base.base_model, seed=7)
    assert load_base(own_base).fingerprint != first
    assert len(calls) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": []}'])
def test_a_damaged_cache_entry_is_computed_again(own_base: Settings, content: str) -> None:
    first = load_base(own_base).fingerprint
    (entry,) = (own_base.cache_dir / "fingerprints").iterdir()
    entry.write_text(content)
    assert load_base(own_base).fingerprint == first


def test_the_error_for_a_broken_base_model_names_the_setting(own_base: Settings) -> None:
    assert own_base.base_model is not None
    (own_base.base_model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"LORAQ_BASE_MODEL: .*model\.safetensors"):
        load_base(own_base)


@pytest.mark.parametrize(
    ("named", "remarked"),
    [
        (None, False),
        ("tiny-llama", False),
        ("someone/Tiny-Llama", False),
        ("/home/someone/models/tiny-llama/", False),
        ("original/Name", False),
        ("someone/tiny-llama-v2", True),
        ("", True),
    ],
)
def test_names_are_compared_by_their_last_part(own_base: Settings, named: str | None, remarked: bool) -> None:
    assert own_base.base_model is not None
    config = own_base.base_model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": "Original/name"}))
    remark = load_base(own_base).remark_on(named)
    assert (remark is not None) == remarked


def test_a_remark_names_both_base_models() -> None:
    remark = BaseModel(Path("/models/a"), "f", frozenset({"a"})).remark_on("someone/b")
    assert remark is not None
    assert "'someone/b'" in remark
    assert "serves a;" in remark


def test_the_error_for_a_missing_base_model_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LORAQ_BASE_MODEL is not set"):
        load_base(Settings(_env_file=None, cache_dir=tmp_path))
