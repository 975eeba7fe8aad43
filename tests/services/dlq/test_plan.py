"""What becomes of one dead letter that is to be sent back."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode
from services.client.signing import SIGNATURE_HEADER, signature
from services.dlq.dead_letters import Letter
from services.dlq.edits import Edit
from services.dlq.plan import Order, Refuse, Send, plan
from services.kafka.headers import Origin
from services.tenants.tenants import ProducerKeys
from tests.services.dlq.dead_letters import TOPIC, Message, letter_of, put_aside, request

ORDER = Order(topics={TOPIC: 3, "loraq.default.jobs.batch": 3})
HEADERS = st.lists(
    st.tuples(st.sampled_from(["mine", "traceparent", SIGNATURE_HEADER]), st.none() | st.binary(max_size=9)), max_size=4
).map(tuple)


def sent(letter: Letter, order: Order = ORDER) -> Send:
    planned = plan(letter, order)
    assert isinstance(planned, Send), planned
    return planned


def refused(letter: Letter, order: Order = ORDER) -> str:
    planned = plan(letter, order)
    assert isinstance(planned, Refuse), planned
    return planned.reason


@given(st.none() | st.binary(max_size=9), st.binary(max_size=60), HEADERS)
def test_a_letter_goes_back_byte_for_byte_with_key_and_headers_and_where_it_stood(key, value, headers) -> None:
    each = sent(put_aside(value, key=key, headers=headers, code=ErrorCode.UNAUTHENTICATED))
    assert (each.topic, each.partition, each.key, each.value) == (TOPIC, 1, key, value)
    own = (("loraq-origin", f"{TOPIC}/1/7/1600000000000".encode()), ("loraq-dead-letter", b"2:17"))
    assert each.headers == (*headers, *own)


def test_where_a_record_first_stood_survives_any_number_of_replays() -> None:
    first = sent(put_aside(b"{}", code=ErrorCode.UNAUTHENTICATED))
    again = put_aside(first.value, headers=first.headers, code=ErrorCode.UNAUTHENTICATED, offset=99)
    assert again.source is not None
    assert again.source.offset == 99
    assert sent(again).headers == first.headers
    assert Origin.parsed(dict(first.headers)["loraq-origin"] or b"").offset == 7


def test_another_lane_is_named_and_a_partition_that_is_gone_is_left_to_the_partitioner() -> None:
    letter = put_aside(b"{}", code=ErrorCode.UNAUTHENTICATED)
    assert sent(letter, replace(ORDER, to_topic="loraq.default.jobs.batch")).topic == "loraq.default.jobs.batch"
    assert sent(letter, replace(ORDER, topics={TOPIC: 1})).partition is None
    assert "is no job topic of this pool; say --lane" in refused(letter, replace(ORDER, topics={"other": 3}))


def test_what_loraq_did_not_put_there_is_not_sent_back() -> None:
    assert "loraq did not put it there: it has no loraq-error-code" in refused(letter_of(Message(b"k", b"v", [])))


def test_what_no_client_can_send_needs_another_value() -> None:
    letter = replace(put_aside(b"{}", key=None, code=ErrorCode.UNAUTHENTICATED), value=None)
    assert "neither key nor value" in refused(letter)
    assert sent(letter, replace(ORDER, edit=Edit(value=request()))).value == request()


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        (put_aside(request(colour="red")), "still invalid: field 'colour' is not known"),
        (put_aside(request()), "valid by this version"),
        (put_aside(request(), code=ErrorCode.ID_CONFLICT), "--unset job_id gives it an id of its own"),
    ],
)
def test_what_would_fail_again_needs_force(letter: Letter, reason: str) -> None:
    assert reason in refused(letter)
    assert sent(letter, replace(ORDER, force=True)).value == letter.value


def test_a_value_that_was_not_kept_needs_another() -> None:
    letter = put_aside(b" " * 3_000_000)
    assert "3000000 bytes, was too large to be kept" in refused(letter, replace(ORDER, force=True))
    assert sent(letter, replace(ORDER, edit=Edit(value=request()))).value == request()


def test_fields_are_set_and_removed_and_the_rest_stays() -> None:
    letter = put_aside(request(colour="red", metadata={"a": "ä"}, job_id="x"))
    edit = Edit(sets=(("sampling.max_tokens", 4), ("adapter", "tone")), unsets=("colour", "job_id", "metadata.b.c"))
    value = json.loads(sent(letter, replace(ORDER, edit=edit)).value or b"")
    assert value == {
        "tenant": "acme",
        "prompt": "hello",
        "metadata": {"a": "ä"},
        "sampling": {"max_tokens": 4},
        "adapter": "tone",
    }


@pytest.mark.parametrize(
    ("letter", "edit", "reason"),
    [
        (put_aside(b"\xff"), Edit(unsets=("colour",)), "its value is not JSON"),
        (put_aside(b"[1]"), Edit(unsets=("colour",)), "no JSON object"),
        (put_aside(b"[" * 100_000), Edit(unsets=("colour",)), "its value is not JSON"),
        (put_aside(b"{}"), Edit(sets=((".".join("a" * 100_000), 1),)), "would be nested too deeply"),
        (put_aside(b"{}"), Edit(value=b"[" * 100_000), "still no valid job request: the value is not JSON"),
        (put_aside(request(sampling=3)), Edit(sets=(("sampling.max_tokens", 1),)), "'sampling' is no object"),
        (put_aside(request(colour=1)), Edit(sets=(("adapter", "tone"),)), "still no valid job request: field 'colour'"),
    ],
)
def test_an_edit_that_mends_nothing_is_refused(letter: Letter, edit: Edit, reason: str) -> None:
    assert reason in refused(letter, replace(ORDER, edit=edit))


def test_an_edited_letter_is_signed_only_when_someone_vouches_for_it() -> None:
    signed = put_aside(request(colour=1), headers=((SIGNATURE_HEADER, b"old"), ("mine", b"x")))
    unsigned = put_aside(request(colour=1))
    mend = replace(ORDER, edit=Edit(unsets=("colour",)))
    assert "--sign makes one" in refused(signed, mend)
    assert "--sign makes one" in refused(unsigned, replace(mend, demands_signature=True))
    assert sent(unsigned, mend).headers[0][0] == "loraq-origin"
    assert "no active tenant 'acme'" in refused(
        signed, replace(mend, sign=True, producer_keys=ProducerKeys({}, frozenset()))
    )
    damaged = replace(mend, sign=True, producer_keys=ProducerKeys({"other": b"key"}, frozenset({"acme"})))
    assert "the producer key of tenant 'acme' is damaged" in refused(signed, damaged)
    each = sent(signed, replace(mend, sign=True, producer_keys=ProducerKeys({"acme": b"key"}, frozenset())))
    assert [value for name, value in each.headers if name == SIGNATURE_HEADER] == [
        signature(b"key", each.value or b"").encode()
    ]
