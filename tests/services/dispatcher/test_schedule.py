"""When a webhook is retried."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.schedule import MAX_RETRY_AFTER, RetryPolicy, backoff, decide, parse_retry_after
from services.webhooks.outcome import (
    AttemptResult,
    Blocked,
    Delivered,
    Failed,
    NotAllowed,
    Outcome,
    Responded,
    Retry,
    Unreachable,
    Unsendable,
)

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
POLICY = RetryPolicy(
    delays=(timedelta(seconds=5), timedelta(minutes=5), timedelta(hours=2)), max_attempts=6, ttl=timedelta(days=3)
)
RESULTS = st.one_of(
    st.builds(Responded, st.integers(100, 599), st.none() | st.text(max_size=40)),
    st.builds(Unreachable, st.just("no route"), st.booleans()),
    st.builds(Unsendable, st.just("bad URL")),
    st.builds(NotAllowed),
)


def outcome(
    result: AttemptResult, attempt: int = 1, started_at: datetime = NOW, now: datetime = NOW, random: float = 0.0
) -> Outcome:
    return decide(result, attempt=attempt, started_at=started_at, policy=POLICY, now=now, random=random)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_is_delivered(status: int) -> None:
    assert outcome(Responded(status)) == Delivered()


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 408, 429, 500, 502, 503])
def test_any_other_status_is_retried(status: int) -> None:
    assert isinstance(outcome(Responded(status)), Retry)


def test_410_is_final() -> None:
    assert isinstance(outcome(Responded(410)), Failed)


def test_a_refused_address_is_final_and_gives_no_detail() -> None:
    assert outcome(NotAllowed()) == Blocked("address not allowed")


def test_an_unusable_url_is_final() -> None:
    assert outcome(Unsendable("the URL is malformed")) == Failed("the URL is malformed")


def test_the_number_of_attempts_is_limited() -> None:
    assert isinstance(outcome(Responded(500), attempt=5), Retry)
    assert outcome(Responded(500), attempt=6) == Failed("HTTP 500; given up after 6 attempts")


def test_the_time_to_live_is_limited() -> None:
    started_at = NOW - timedelta(days=3) + timedelta(minutes=59)
    assert isinstance(outcome(Responded(500), attempt=2, started_at=started_at), Retry)
    assert isinstance(outcome(Responded(500), attempt=3, started_at=started_at), Failed)


def test_retry_after_applies_if_it_is_longer_than_the_scheduled_delay() -> None:
    assert outcome(Responded(503, "90")) == Retry(timedelta(seconds=90), "HTTP 503")
    assert outcome(Responded(429, "1"), attempt=2) == Retry(timedelta(minutes=2.5), "HTTP 429")


@given(attempt=st.integers(1, 50), random=st.floats(0, 1, exclude_max=True))
def test_backoff_is_between_half_and_all_of_the_delay(attempt: int, random: float) -> None:
    delay = POLICY.delays[min(attempt, 3) - 1]
    assert delay / 2 <= backoff(attempt, POLICY, random) <= delay


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 7 ", 7),
        ("-7", 0),
        ("1.5", 0),
        ("soon", 0),
        ("\u0667", 0),
        ("9" * 500, MAX_RETRY_AFTER.total_seconds()),
        ("Tue, 01 Dec 2026 12:01:00 GMT", 60),
        ("Tue, 01 Dec 2026 12:01:00 -0000", 60),
        ("Tue, 01 Dec 2026 11:00:00 GMT", 0),
        ("Fri, 01 Jan 9999 00:00:00 GMT", MAX_RETRY_AFTER.total_seconds()),
        ("Fri, 99 Zzz 2026 99:99:99 GMT", 0),
        ("Thu, 01 Jan 99999999999 00:00:00 GMT", 0),
    ],
)
def test_retry_after_is_parsed_in_every_form(value: str | None, seconds: float) -> None:
    assert parse_retry_after(value, NOW) == timedelta(seconds=seconds)


DATE_PARTS = st.sampled_from(
    ["Thu,", "01", "31", "Jan", "2026", "9" * 5, "9" * 30, "23:59:59", "GMT", "-2359", "+" + "9" * 11]
)


@given(value=st.text(max_size=60) | st.lists(DATE_PARTS, max_size=7).map(" ".join))
def test_retry_after_never_raises_and_stays_in_bounds(value: str) -> None:
    assert timedelta(0) <= parse_retry_after(value, NOW) <= MAX_RETRY_AFTER


@given(date=st.datetimes(timezones=st.just(UTC), min_value=datetime(1970, 1, 1)))  # noqa: DTZ001  # hypothesis wants naive bounds
def test_any_http_date_is_clamped(date: datetime) -> None:
    delay = parse_retry_after(format_datetime(date, usegmt=True), NOW)
    assert delay == min(max(date.replace(microsecond=0) - NOW, timedelta(0)), MAX_RETRY_AFTER)


@given(result=RESULTS, attempt=st.integers(1, 60), age=st.timedeltas(timedelta(0), timedelta(days=10)))
def test_every_retry_schedule_ends(result: AttemptResult, attempt: int, age: timedelta) -> None:
    found = outcome(result, attempt=attempt, started_at=NOW - age)
    if isinstance(found, Retry):
        assert attempt < POLICY.max_attempts
        assert found.after > timedelta(0)
        assert age + found.after <= POLICY.ttl
