"""When to retry a webhook. Pure: `now` and the random number are arguments.

The delays are those that the Standard Webhooks specification suggests, each with equal jitter: half of it is fixed and
half is random, so that a receiver that recovers does not get all retries at once.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

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

GONE = 410
MAX_RETRY_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class RetryPolicy:
    """`delays[i]` follows attempt i + 1, the last one every later attempt; `ttl` limits the whole schedule."""

    delays: tuple[timedelta, ...]
    max_attempts: int
    ttl: timedelta


def decide(
    result: AttemptResult, *, attempt: int, started_at: datetime, policy: RetryPolicy, now: datetime, random: float
) -> Outcome:
    """The outcome of attempt number `attempt` (from 1) of a schedule; `random` is uniform in [0, 1)."""
    match result:
        case NotAllowed():
            return Blocked()
        case Unsendable(reason):
            return Failed(reason)
        case Responded(status) if 200 <= status < 300:
            return Delivered()
        case Responded(status) if status == GONE:
            return Failed("HTTP 410: the endpoint is gone")
        case Responded(status, retry_after):
            min_delay = parse_retry_after(retry_after, now)
            return _retry_or_fail(_reason(status), min_delay, attempt, started_at, policy, now, random)
        case Unreachable(reason):
            return _retry_or_fail(reason, timedelta(0), attempt, started_at, policy, now, random)


def _retry_or_fail(
    reason: str,
    min_delay: timedelta,
    attempt: int,
    started_at: datetime,
    policy: RetryPolicy,
    now: datetime,
    random: float,
) -> Retry | Failed:
    if attempt >= policy.max_attempts:
        return Failed(f"{reason}; given up after {attempt} attempts")
    after = max(backoff(attempt, policy, random), min_delay)
    if now + after > started_at + policy.ttl:
        return Failed(f"{reason}; given up {policy.ttl} after its first attempt was due")
    return Retry(after, reason)


def backoff(attempt: int, policy: RetryPolicy, random: float) -> timedelta:
    """The delay after attempt number `attempt`, between half and all of the policy's."""
    delay = policy.delays[min(attempt, len(policy.delays)) - 1]
    return delay / 2 + delay / 2 * random


def parse_retry_after(value: str | None, now: datetime) -> timedelta:
    """The delay of a Retry-After header, in seconds or as an HTTP date, clamped to a day; 0 if absent or malformed."""
    if value is None:
        return timedelta(0)
    text = value.strip()
    if text.isascii() and text.isdigit():
        delay = timedelta(seconds=min(int(text[:9]), MAX_RETRY_AFTER.total_seconds()))
    else:
        delay = _until(text, now)
    return min(max(delay, timedelta(0)), MAX_RETRY_AFTER)


def _until(http_date: str, now: datetime) -> timedelta:
    try:
        date = parsedate_to_datetime(http_date)
    except (ValueError, OverflowError):  # OverflowError: the year is out of range
        return timedelta(0)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)) - now


def _reason(status: int) -> str:
    return f"HTTP {status}: redirects are not followed" if 300 <= status < 400 else f"HTTP {status}"
