"""Tenants' secrets: generation, and encryption for the database (AES-256-GCM, with a new nonce each)."""

import base64
import binascii
import os
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import SecretStr

from services.errors import ConfigError, MissingSettingError

KEY_BYTES = 32
NONCE_BYTES = 12
SEAL_VERSION = b"\x01"
HOW_TO_CREATE = "create one with `openssl rand -base64 32` and set the same one for every process"


class SecretBox:
    """Encrypts and decrypts small secrets with LORAQ_SECRET_KEY; raises ConfigError if it is missing or malformed."""

    def __init__(self, secret_key: SecretStr | None) -> None:
        self._cipher = AESGCM(_key_of(secret_key))

    def seal(self, secret: bytes) -> bytes:
        """Version byte, nonce, ciphertext and tag."""
        nonce = os.urandom(NONCE_BYTES)
        return SEAL_VERSION + nonce + self._cipher.encrypt(nonce, secret, SEAL_VERSION)

    def open(self, sealed: bytes) -> bytes:
        """The secret; raises ConfigError if it was sealed with another key or has been changed."""
        version, nonce, text = sealed[:1], sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, text, version)
        except (InvalidTag, ValueError) as error:
            raise ConfigError("LORAQ_SECRET_KEY: a stored secret was sealed with another key or is damaged") from error


def new_webhook_secret() -> str:
    """A Standard Webhooks secret: `whsec_` and 32 random bytes in base64."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def new_producer_key() -> str:
    """A key with which a tenant signs its records. The HMAC key is this text in UTF-8, including the prefix."""
    return "lqpk_" + secrets.token_urlsafe(KEY_BYTES)


def new_secret_key() -> str:
    """A random value for LORAQ_SECRET_KEY."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def _key_of(secret_key: SecretStr | None) -> bytes:
    if secret_key is None:
        raise MissingSettingError(f"LORAQ_SECRET_KEY is not set; {HOW_TO_CREATE}")
    try:
        key = base64.b64decode(secret_key.get_secret_value(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"LORAQ_SECRET_KEY is not base64; {HOW_TO_CREATE}") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"LORAQ_SECRET_KEY holds {len(key)} bytes instead of {KEY_BYTES}; {HOW_TO_CREATE}")
    return key
