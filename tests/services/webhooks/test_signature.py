"""Webhook signatures, against the standardwebhooks package in both directions."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from services.tenants.secrets import new_webhook_secret
from services.webhooks.signature import SecretError, SignatureError, key_of, sign, verify

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = '{"text":"grüße 🎉"}'.encode()
NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


@given(body=st.text(), webhook_id=st.uuids(), east=st.integers(-14, 14))
def test_the_standardwebhooks_package_accepts_our_signatures(body: str, webhook_id: object, east: int) -> None:
    secret = new_webhook_secret()
    now = datetime.now(timezone(timedelta(hours=east)))
    headers = sign(secret, str(webhook_id), now, body.encode())
    Webhook(secret).verify(body.encode(), headers, json_parse=False)


def test_we_accept_signatures_of_the_standardwebhooks_package() -> None:
    signature = Webhook(SECRET).sign("msg_1", NOW, BODY.decode())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(NOW.timestamp())),
        "webhook-signature": f"v1a,other v1,AAAA {signature}",
    }
    verify(SECRET, headers, BODY, NOW)


@given(
    part=st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature", "body", "secret"]),
    garbage=st.text(min_size=1, max_size=40),
)
def test_no_part_can_be_replaced(part: str, garbage: str) -> None:
    headers = sign(SECRET, "msg_1", NOW, BODY)
    secret, body = SECRET, BODY
    if part == "body":
        body = garbage.encode("utf-8", "surrogatepass")
    elif part == "secret":
        secret = new_webhook_secret()
    else:
        headers[part] = garbage
    with pytest.raises(SignatureError):
        verify(secret, headers, body, NOW)


@pytest.mark.parametrize("minutes", [-6, 6])
def test_an_old_or_future_timestamp_is_refused(minutes: int) -> None:
    with pytest.raises(SignatureError, match="differs from this clock"):
        verify(SECRET, sign(SECRET, "msg_1", NOW, BODY), BODY, NOW + timedelta(minutes=minutes))


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_reported(missing: str) -> None:
    headers = sign(SECRET, "msg_1", NOW, BODY)
    del headers[missing]
    with pytest.raises(SignatureError, match=missing):
        verify(SECRET, headers, BODY, NOW)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64!", "whsec_a"])
def test_a_malformed_secret_is_refused(secret: str) -> None:
    with pytest.raises(SecretError):
        key_of(secret)


def test_prefix_and_padding_of_a_secret_are_optional() -> None:
    assert key_of("whsec_AQID") == key_of("AQID") == b"\x01\x02\x03"
    assert key_of("whsec_AQ==") == key_of("AQ") == b"\x01"
