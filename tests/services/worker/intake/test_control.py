"""What a control record asks for, and for whom it may speak."""

from dataclasses import dataclass, field
from uuid import UUID

import pytest

from schemas.control import Cancellation
from services.client.signing import SIGNATURE_HEADER, signature
from services.worker.intake.control import Refusal, authorize, parse
from services.worker.intake.records import TenantKey

ASKED = Cancellation(tenant="acme", job_id=UUID("01920000-0000-7000-8000-000000000000"))
VALUE = ASKED.model_dump_json().encode()
KNOWN = TenantKey(b"key", disabled=False)


@dataclass
class Message:
    """As the Kafka library has it."""

    value: bytes = VALUE
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


def reason(found: object) -> str:
    assert isinstance(found, Refusal)
    return found.reason


def test_a_cancellation_is_read() -> None:
    assert parse(VALUE) == ASKED


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "no value"),
        (b"\xff", "JSON"),
        (b'{"tenant": "acme"}', "job_id"),
        (VALUE[:-1] + b', "when": "now"}', "when"),
    ],
)
def test_anything_else_is_refused_by_name(value: bytes | None, why: str) -> None:
    assert why in reason(parse(value))


def test_where_no_signature_is_demanded_a_known_tenant_is_enough() -> None:
    assert authorize(ASKED, Message(), KNOWN, signed=False) is None
    assert "'acme'" in reason(authorize(ASKED, Message(), None, signed=False))


def test_a_signature_is_of_the_value_and_by_the_tenants_key() -> None:
    def header(value: bytes | None) -> Message:
        return Message(headers=[(SIGNATURE_HEADER, value)])

    good = signature(b"key", VALUE)
    assert authorize(ASKED, header(good.encode()), KNOWN, signed=True) is None
    assert authorize(ASKED, header(good.upper().encode()), KNOWN, signed=True) is None
    assert "does not match" in reason(authorize(ASKED, header(b"00"), KNOWN, signed=True))
    assert SIGNATURE_HEADER in reason(authorize(ASKED, header(None), KNOWN, signed=True))
    assert SIGNATURE_HEADER in reason(authorize(ASKED, Message(), KNOWN, signed=True))
    damaged = TenantKey(None, disabled=False)
    assert "key of tenant 'acme' is damaged" in reason(authorize(ASKED, header(good.encode()), damaged, signed=True))
    assert authorize(ASKED, Message(), damaged, signed=False) is None
