"""Signatures of records, by which a worker verifies the tenant on topics that tenants share."""

import hashlib
import hmac

SIGNATURE_HEADER = "loraq-signature"


def signature(producer_key: bytes, value: bytes) -> str:
    """HMAC-SHA256 of a record's value in lower-case hex: the content of the header `loraq-signature`.

    `producer_key` is the whole text that `loraq tenants add` prints, with its prefix `lqpk_`, as UTF-8.
    """
    return hmac.new(producer_key, value, hashlib.sha256).hexdigest()
