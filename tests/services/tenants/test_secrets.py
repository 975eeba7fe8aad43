"""Secrets: only the right key opens them, and they have the format that other libraries expect."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from standardwebhooks import Webhook

from services.errors import ConfigError
from services.tenants.secrets import SecretBox, new_producer_key, new_secret_key, new_webhook_secret

KEY = SecretStr(new_secret_key())


@given(st.binary(max_size=200))
def test_a_sealed_secret_can_be_opened(secret: bytes) -> None:
    box = SecretBox(KEY)
    sealed = box.seal(secret)
    assert box.open(sealed) == secret
    assert sealed != box.seal(secret), "a new nonce each time"


@given(st.integers(min_value=0), st.integers(1, 255))
def test_any_changed_byte_is_detected(position: int, change: int) -> None:
    box = SecretBox(KEY)
    sealed = bytearray(box.seal(b"secret"))
    sealed[position % len(sealed)] ^= change
    with pytest.raises(ConfigError, match="LORAQ_SECRET_KEY"):
        box.open(bytes(sealed))


@pytest.mark.parametrize("damaged", [b"", b"\x01", b"\x01" + b"0" * 12])
def test_a_truncated_secret_is_detected(damaged: bytes) -> None:
    with pytest.raises(ConfigError, match="LORAQ_SECRET_KEY"):
        SecretBox(KEY).open(damaged)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(ConfigError, match="sealed with another key"):
        SecretBox(SecretStr(new_secret_key())).open(SecretBox(KEY).seal(b"secret"))


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (None, "is not set"),
        (SecretStr("not base64!"), "is not base64"),
        (SecretStr(base64.b64encode(b"short").decode()), "holds 5 bytes instead of 32"),
    ],
)
def test_a_wrong_key_is_refused_with_the_command_that_creates_one(key: SecretStr | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        SecretBox(key)
    assert "openssl rand -base64 32" in str(refused.value)


def test_new_secrets_are_distinct_and_well_formed() -> None:
    secret = new_webhook_secret()
    assert Webhook(secret).sign is not None
    assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32
    assert len({new_webhook_secret() for _ in range(50)} | {new_producer_key() for _ in range(50)}) == 100
