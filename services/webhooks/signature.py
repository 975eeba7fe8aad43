"""Webhook signatures as in the Standard Webhooks specification, version 1 (symmetric). Pure: `now` is an argument.

signature = base64(HMAC-SHA256(key, webhook-id "." webhook-timestamp "." body))
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime, timedelta

from services.errors import InputError

SECRET_PREFIX = "whsec_"  # noqa: S105  # the public prefix, not a secret
ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
TOLERANCE = timedelta(minutes=5)


class SecretError(InputError):
    """A webhook secret is malformed: it must be `whsec_` followed by base64."""


class SignatureError(InputError):
    """The signature of a webhook is missing, wrong or not recent."""


def key_of(secret: str) -> bytes:
    """The HMAC key of a `whsec_…` secret; prefix and base64 padding are optional. Raises SecretError."""
    encoded = secret.removeprefix(SECRET_PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SecretError("the webhook secret is not base64 after its prefix whsec_") from error
    if not key:
        raise SecretError("the webhook secret is empty")
    return key


def sign(secret: str, webhook_id: str, sent_at: datetime, body: bytes) -> dict[str, str]:
    """The three headers of one attempt; `sent_at` is timezone-aware and increases with each attempt."""
    timestamp = int(sent_at.timestamp())
    return {
        ID_HEADER: webhook_id,
        TIMESTAMP_HEADER: str(timestamp),
        SIGNATURE_HEADER: "v1," + _signature(key_of(secret), webhook_id, timestamp, body),
    }


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: datetime) -> None:
    """Return if `body` was signed with `secret` within five minutes of `now`; raises SignatureError otherwise.

    Header names must be in lower case. One matching signature of several, separated by spaces, is enough.
    """
    webhook_id, timestamp, signatures = (
        _header(headers, name) for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
    )
    sent_at = _seconds(timestamp)
    if abs(now.timestamp() - sent_at) > TOLERANCE.total_seconds():
        raise SignatureError(f"{TIMESTAMP_HEADER} {timestamp} differs from this clock by more than {TOLERANCE}")
    expected = _signature(key_of(secret), webhook_id, sent_at, body).encode()
    candidates = [text.removeprefix("v1,").encode() for text in signatures.split(" ") if text.startswith("v1,")]
    if not any(hmac.compare_digest(expected, candidate) for candidate in candidates):
        raise SignatureError(f"no signature in {SIGNATURE_HEADER} matches this body and secret")


def _signature(key: bytes, webhook_id: str, timestamp: int, body: bytes) -> str:
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def _header(headers: Mapping[str, str], name: str) -> str:
    if not (value := headers.get(name)):
        raise SignatureError(f"the header {name} is missing")
    return value


def _seconds(timestamp: str) -> int:
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise SignatureError(f"{TIMESTAMP_HEADER} {timestamp[:32]!r} is not a number of seconds")
    return int(timestamp)
