"""The worker's settings are passed to its engine, and rejected ones are named."""

from pathlib import Path

import pytest

from services.errors import ConfigError
from services.process.settings import load_settings
from services.worker.engine.config import engine_config

SETTINGS = {
    "LORAQ_DEVICE": "cuda:1",
    "LORAQ_DTYPE": "float16",
    "LORAQ_MAX_BATCH_SIZE": "64",
    "LORAQ_MAX_BATCH_TOKENS": "4096",
    "LORAQ_POOL_BYTES": "1000000000",
    "LORAQ_HOST_BYTES": "300000000",
    "LORAQ_GRAPHS": "false",
    "LORAQ_BATCH_INVARIANT": "true",
    "LORAQ_LORA_STREAM": "true",
    "LORAQ_ENGINE_THREADS": "3",
}


def test_every_engine_setting_is_passed_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, value in {**SETTINGS, "LORAQ_BASE_MODEL": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    config = engine_config(load_settings(_env_file=None))
    assert (config.model, config.device, config.dtype) == (tmp_path, "cuda:1", "float16")
    assert (config.max_batch_size, config.max_batch_tokens, config.threads) == (64, 4096, 3)
    assert (config.pool_bytes, config.host_bytes) == (1_000_000_000, 300_000_000)
    assert (config.graphs, config.batch_invariant, config.lora_stream) == (False, True, True)


def test_a_setting_that_the_engine_rejects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAQ_MAX_BATCH_TOKENS", "8")
    with pytest.raises(ConfigError, match="max_batch_tokens is 8; it must be at least max_batch_size, 32"):
        engine_config(load_settings(_env_file=None))
