"""How a tenant's records are signed where tenants share a topic; producer and worker agree on it here."""

import hashlib
import hmac

SIGNATURE_HEADER = "loraq-signature"


def signature(producer_key: bytes, value: bytes) -> str:
    """HMAC-SHA256 of a record's value, in hex: the content of the header `loraq-signature`."""
    return hmac.new(producer_key, value, hashlib.sha256).hexdigest()
