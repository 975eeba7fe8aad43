"""A bad setting raises one sentence that names it and never shows a secret."""

from pathlib import Path

import pytest

from services.errors import ConfigError
from services.process.settings import load_settings


def refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> str:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        load_settings(_env_file=None)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("LORAQ_KAFKA_BOOTSTRAP", "host:abc", "'host:abc' is not host:port, with a port from 1 to 65535"),
        ("LORAQ_KAFKA_BOOTSTRAP", "a:1, b:99999", "'b:99999' is not host:port"),
        ("LORAQ_KAFKA_BOOTSTRAP", "host", "'host' is not host:port"),
        ("LORAQ_KAFKA_BOOTSTRAP", "a" * 300 + ":1", "is not host:port"),
        ("LORAQ_HTTP_HOST", "a" * 300, "it is neither an IP address nor a valid host name (got 'aaa"),
        ("LORAQ_OTLP_ENDPOINT", "collector:4318", "it is not a URL; write it as http://host:port"),
        ("LORAQ_OTLP_ENDPOINT", "http://collector:port", "with a port from 1 to 65535 (got 'http://collector:port')"),
        ("LORAQ_S3_ENDPOINT", "http://127.0.0.1:99999", "with a port from 1 to 65535"),
        ("LORAQ_S3_ENDPOINT", "s3.example", "it is not a URL"),
        ("LORAQ_S3_ENDPOINT", "http://", "it is not a URL"),
        ("LORAQ_WEBHOOK_ALLOW_NETWORKS", '["10.0.0.0/99"]', "'10.0.0.0/99' is not a network; write it as 10.1.0.0/16"),
        ("LORAQ_POOL_BYTES", "9" * 20, "Input should be less than or equal to 1125899906842624"),
        ("LORAQ_LEASE_S", "0.0001", "Input should be greater than or equal to 1 (got '0.0001')"),
        ("LORAQ_KAFKA_SESSION_TIMEOUT_S", "0.1", "Input should be greater than or equal to 1"),
        ("LORAQ_DATABASE_TIMEOUT_S", "0.0001", "Input should be greater than or equal to 0.01"),
        ("LORAQ_DRAIN_S", "nan", "Input should be"),
        ("LORAQ_LANES", '["standard", "slow"]', "Input should be 'interactive', 'standard' or 'batch' (got 'slow')"),
        ("LORAQ_WEBHOOK_RETRY_DELAYS_S", "[5, 0]", "Input should be greater than or equal to 0.01 (got 0)"),
        ("LORAQ_BASE_MODEL", "a" * 5000, "the directory cannot be read: File name too long (got 'aaa"),
        ("LORAQ_TOPIC_PREFIX", "\udcff", "Input should be a valid string"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    message = refused(monkeypatch, name, value)
    assert message.startswith(f"{name}: ")
    assert sentence in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("LORAQ_DATABASE_URL", "postgresql://loraq:ge/heim@host:5432/loraq", "percent-encode / ? # @"),
        ("LORAQ_DATABASE_URL", "postgresql://loraq:geheim@host:abc/loraq", "it is not a Postgres URL"),
        ("LORAQ_DATABASE_URL", "postgresql://loraq:geheim@host/\udcff", "it is not UTF-8; copy it again"),
        ("LORAQ_PRODUCER_KEY", "lqpk_geheim\udcff", "it is not UTF-8; copy it again"),
        ("LORAQ_SECRET_KEY", "geheim\udcff", "it is not UTF-8; copy it again"),
    ],
)
def test_a_bad_secret_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    message = refused(monkeypatch, name, value)
    assert message.startswith(f"{name}: ")
    assert sentence in message
    assert "heim" not in message


def test_an_env_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes(b"LORAQ_POOL=\xff")
    with pytest.raises(ConfigError, match=r"^\.env is not UTF-8: invalid start byte at byte 11; save it as UTF-8$"):
        load_settings()
