"""The plan for the replay of one dead letter."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode
from services.client.signing import SIGNATURE_HEADER, signature
from services.dlq.dead_letters import DeadLetter
from services.dlq.edits import Edit
from services.dlq.plan import RecordToSend, Refusal, ReplayOptions, plan
from services.kafka.headers import Origin
from services.tenants.tenants import ProducerKeys
from tests.services.dlq.dead_letters import TOPIC, Message, dead_letter_of, dead_lettered, request

OPTIONS = ReplayOptions(topics={TOPIC: 3, "loraq.default.jobs.batch": 3})
HEADERS = st.lists(
    st.tuples(st.sampled_from(["mine", "traceparent", SIGNATURE_HEADER]), st.none() | st.binary(max_size=9)), max_size=4
).map(tuple)


def sent(letter: DeadLetter, options: ReplayOptions = OPTIONS) -> RecordToSend:
    planned = plan(letter, options)
    assert isinstance(planned, RecordToSend), planned
    return planned


def refused(letter: DeadLetter, options: ReplayOptions = OPTIONS) -> str:
    planned = plan(letter, options)
    assert isinstance(planned, Refusal), planned
    return planned.reason


@given(st.none() | st.binary(max_size=9), st.binary(max_size=60), HEADERS)
def test_a_dead_letter_is_replayed_unchanged_with_key_headers_and_origin(key, value, headers) -> None:
    each = sent(dead_lettered(value, key=key, headers=headers, code=ErrorCode.UNAUTHENTICATED))
    assert (each.topic, each.partition, each.key, each.value) == (TOPIC, 1, key, value)
    own = (("loraq-origin", f"{TOPIC}/1/7/1600000000000".encode()), ("loraq-dead-letter", b"2:17"))
    assert each.headers == (*headers, *own)


def test_the_original_position_survives_repeated_replays() -> None:
    first = sent(dead_lettered(b"{}", code=ErrorCode.UNAUTHENTICATED))
    again = dead_lettered(first.value, headers=first.headers, code=ErrorCode.UNAUTHENTICATED, offset=99)
    assert again.source is not None
    assert again.source.offset == 99
    assert sent(again).headers == first.headers
    assert Origin.parsed(dict(first.headers)["loraq-origin"] or b"").offset == 7


def test_a_lane_can_be_given_and_a_missing_partition_is_left_to_the_partitioner() -> None:
    letter = dead_lettered(b"{}", code=ErrorCode.UNAUTHENTICATED)
    assert sent(letter, replace(OPTIONS, to_topic="loraq.default.jobs.batch")).topic == "loraq.default.jobs.batch"
    assert sent(letter, replace(OPTIONS, topics={TOPIC: 1})).partition is None
    assert "is not a job topic of this pool; give --lane" in refused(letter, replace(OPTIONS, topics={"other": 3}))


def test_a_record_that_loraq_did_not_write_is_not_replayed() -> None:
    assert "loraq did not write it: it has no loraq-error-code" in refused(dead_letter_of(Message(b"k", b"v", [])))


def test_a_record_that_no_client_can_send_needs_a_new_value() -> None:
    letter = replace(dead_lettered(b"{}", key=None, code=ErrorCode.UNAUTHENTICATED), value=None)
    assert "neither key nor value" in refused(letter)
    assert sent(letter, replace(OPTIONS, edit=Edit(value=request()))).value == request()


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        (dead_lettered(request(colour="red")), "still invalid: field 'colour' is not known"),
        (dead_lettered(request()), "valid in this version"),
        (dead_lettered(request(), code=ErrorCode.ID_CONFLICT), "--unset job_id gives it a new id"),
    ],
)
def test_a_record_that_would_fail_again_needs_force(letter: DeadLetter, reason: str) -> None:
    assert reason in refused(letter)
    assert sent(letter, replace(OPTIONS, force=True)).value == letter.value


def test_an_omitted_value_needs_a_new_one() -> None:
    letter = dead_lettered(b" " * 3_000_000)
    assert "3000000 bytes was too large to keep" in refused(letter, replace(OPTIONS, force=True))
    assert sent(letter, replace(OPTIONS, edit=Edit(value=request()))).value == request()


def test_fields_are_set_and_removed_and_the_rest_stays() -> None:
    letter = dead_lettered(request(colour="red", metadata={"a": "ä"}, job_id="x"))
    edit = Edit(sets=(("sampling.max_tokens", 4), ("adapter", "tone")), unsets=("colour", "job_id", "metadata.b.c"))
    value = json.loads(sent(letter, replace(OPTIONS, edit=edit)).value or b"")
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
        (dead_lettered(b"\xff"), Edit(unsets=("colour",)), "its value is not JSON"),
        (dead_lettered(b"[1]"), Edit(unsets=("colour",)), "not a JSON object"),
        (dead_lettered(b"[" * 100_000), Edit(unsets=("colour",)), "its value is not JSON"),
        (dead_lettered(b"{}"), Edit(sets=((".".join("a" * 100_000), 1),)), "would be nested too deeply"),
        (dead_lettered(b"{}"), Edit(value=b"[" * 100_000), "still not a valid job request: the value is not JSON"),
        (dead_lettered(request(sampling=3)), Edit(sets=(("sampling.max_tokens", 1),)), "'sampling' is not an object"),
        (
            dead_lettered(request(colour=1)),
            Edit(sets=(("adapter", "tone"),)),
            "still not a valid job request: field 'colour'",
        ),
    ],
)
def test_an_edit_that_leaves_the_request_invalid_is_refused(letter: DeadLetter, edit: Edit, reason: str) -> None:
    assert reason in refused(letter, replace(OPTIONS, edit=edit))


def test_an_edited_record_is_signed_only_on_request() -> None:
    signed = dead_lettered(request(colour=1), headers=((SIGNATURE_HEADER, b"old"), ("mine", b"x")))
    unsigned = dead_lettered(request(colour=1))
    fix = replace(OPTIONS, edit=Edit(unsets=("colour",)))
    assert "--sign signs it" in refused(signed, fix)
    assert "--sign signs it" in refused(unsigned, replace(fix, require_signature=True))
    assert sent(unsigned, fix).headers[0][0] == "loraq-origin"
    assert "tenant 'acme' does not exist or is disabled" in refused(
        signed, replace(fix, sign=True, producer_keys=ProducerKeys({}, frozenset()))
    )
    damaged = replace(fix, sign=True, producer_keys=ProducerKeys({"other": b"key"}, frozenset({"acme"})))
    assert "the producer key of tenant 'acme' is damaged" in refused(signed, damaged)
    each = sent(signed, replace(fix, sign=True, producer_keys=ProducerKeys({"acme": b"key"}, frozenset())))
    assert [value for name, value in each.headers if name == SIGNATURE_HEADER] == [
        signature(b"key", each.value or b"").encode()
    ]
