"""Parsing and authorization of control records."""

from dataclasses import dataclass, field
from uuid import UUID

import pytest

from schemas.control import Cancellation
from services.client.signing import SIGNATURE_HEADER, signature
from services.worker.intake.control import Refusal, authorize, parse
from services.worker.intake.records import TenantKey

CANCELLATION = Cancellation(tenant="acme", job_id=UUID("01920000-0000-7000-8000-000000000000"))
VALUE = CANCELLATION.model_dump_json().encode()
KNOWN = TenantKey(b"key", disabled=False)


@dataclass
class Message:
    """A message as the Kafka library returns it."""

    value: bytes = VALUE
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


def reason(found: object) -> str:
    assert isinstance(found, Refusal)
    return found.reason


def test_a_cancellation_is_parsed() -> None:
    assert parse(VALUE) == CANCELLATION


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "no value"),
        (b"\xff", "JSON"),
        (b'{"tenant": "acme"}', "job_id"),
        (VALUE[:-1] + b', "when": "now"}', "when"),
    ],
)
def test_an_invalid_control_record_is_refused_with_a_reason(value: bytes | None, why: str) -> None:
    assert why in reason(parse(value))


def test_without_required_signatures_a_known_tenant_is_enough() -> None:
    assert authorize(CANCELLATION, Message(), KNOWN, signed=False) is None
    assert "'acme'" in reason(authorize(CANCELLATION, Message(), None, signed=False))


def test_a_signature_must_match_the_value_and_the_tenants_key() -> None:
    def header(value: bytes | None) -> Message:
        return Message(headers=[(SIGNATURE_HEADER, value)])

    good = signature(b"key", VALUE)
    assert authorize(CANCELLATION, header(good.encode()), KNOWN, signed=True) is None
    assert authorize(CANCELLATION, header(good.upper().encode()), KNOWN, signed=True) is None
    assert "does not match" in reason(authorize(CANCELLATION, header(b"00"), KNOWN, signed=True))
    assert SIGNATURE_HEADER in reason(authorize(CANCELLATION, header(None), KNOWN, signed=True))
    assert SIGNATURE_HEADER in reason(authorize(CANCELLATION, Message(), KNOWN, signed=True))
    damaged = TenantKey(None, disabled=False)
    assert "key of tenant 'acme' is damaged" in reason(
        authorize(CANCELLATION, header(good.encode()), damaged, signed=True)
    )
    assert authorize(CANCELLATION, Message(), damaged, signed=False) is None
