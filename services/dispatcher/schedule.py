"""When to try a webhook again. Pure: `now` and the random number are arguments.

The delays are those that the Standard Webhooks specification suggests, each with equal jitter: half of it is fixed,
half is random, so that a receiver coming back is not met by everything at once.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from services.webhooks.outcome import (
    Answer,
    Answered,
    Blocked,
    Delivered,
    Failed,
    NotAllowed,
    Outcome,
    Retry,
    Unreachable,
    Unsendable,
)

GONE = 410
MAX_RETRY_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class RetryPolicy:
    """`delays[i]` follows attempt i + 1, the last one every later attempt; `ttl` counts from its beginning."""

    delays: tuple[timedelta, ...]
    max_attempts: int
    ttl: timedelta


def decide(
    answer: Answer, *, attempt: int, begun_at: datetime, policy: RetryPolicy, now: datetime, random: float
) -> Outcome:
    """What follows from the answer to attempt number `attempt` (from 1); `random` is uniform in [0, 1)."""
    match answer:
        case NotAllowed():
            return Blocked()
        case Unsendable(reason):
            return Failed(reason)
        case Answered(status) if 200 <= status < 300:
            return Delivered()
        case Answered(status) if status == GONE:
            return Failed("HTTP 410: the receiver wants no more of these")
        case Answered(status, retry_after):
            asked = parse_retry_after(retry_after, now)
            return _again(_sentence(status), asked, attempt, begun_at, policy, now, random)
        case Unreachable(reason):
            return _again(reason, timedelta(0), attempt, begun_at, policy, now, random)


def _again(
    reason: str,
    asked: timedelta,
    attempt: int,
    begun_at: datetime,
    policy: RetryPolicy,
    now: datetime,
    random: float,
) -> Retry | Failed:
    if attempt >= policy.max_attempts:
        return Failed(f"{reason}; given up after {attempt} attempts")
    after = max(backoff(attempt, policy, random), asked)
    if now + after > begun_at + policy.ttl:
        return Failed(f"{reason}; given up {policy.ttl} after its first attempt was due")
    return Retry(after, reason)


def backoff(attempt: int, policy: RetryPolicy, random: float) -> timedelta:
    """Delay after attempt number `attempt`, between half and all of the policy's."""
    delay = policy.delays[min(attempt, len(policy.delays)) - 1]
    return delay / 2 + delay / 2 * random


def parse_retry_after(value: str | None, now: datetime) -> timedelta:
    """Retry-After in seconds or as an HTTP date, between 0 and a day; 0 if absent or malformed."""
    if value is None:
        return timedelta(0)
    text = value.strip()
    if text.isascii() and text.isdigit():
        asked = timedelta(seconds=min(int(text[:9]), MAX_RETRY_AFTER.total_seconds()))
    else:
        asked = _until(text, now)
    return min(max(asked, timedelta(0)), MAX_RETRY_AFTER)


def _until(http_date: str, now: datetime) -> timedelta:
    try:
        moment = parsedate_to_datetime(http_date)
    except (ValueError, OverflowError):  # the latter for a year that no date can have
        return timedelta(0)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now


def _sentence(status: int) -> str:
    return f"HTTP {status}: redirects are not followed" if 300 <= status < 400 else f"HTTP {status}"
