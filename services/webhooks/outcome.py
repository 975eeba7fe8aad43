"""The result of one attempt (`AttemptResult`) and what follows for the webhook (`Outcome`)."""

from dataclasses import dataclass, field
from datetime import timedelta


@dataclass(frozen=True)
class Responded:
    """The receiver responded with an HTTP status."""

    status: int
    retry_after: str | None = None


@dataclass(frozen=True)
class Unreachable:
    """No response; `timed_out` if the attempt exceeded its timeout."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True)
class Unsendable:
    """The URL cannot be used: every attempt would fail."""

    reason: str


@dataclass(frozen=True)
class NotAllowed:
    """Webhooks must not reach this address; no connection was made. `address` is for the operator only."""

    address: str = field(default="", compare=False)


AttemptResult = Responded | Unreachable | Unsendable | NotAllowed

ADDRESS_NOT_ALLOWED = "address not allowed"
HOW_TO_ALLOW = "add its network to LORAQ_WEBHOOK_ALLOW_NETWORKS to allow it"


@dataclass(frozen=True)
class Delivered:
    """The receiver accepted it (2xx)."""


@dataclass(frozen=True)
class Retry:
    """Another attempt is due after `after`."""

    after: timedelta
    reason: str


@dataclass(frozen=True)
class Failed:
    """No further attempts."""

    reason: str


@dataclass(frozen=True)
class Blocked:
    """No further attempts: the address is not allowed. The tenant gets no further detail."""

    reason: str = ADDRESS_NOT_ALLOWED


Outcome = Delivered | Retry | Failed | Blocked
