"""What an attempt met (`Answer`), and what follows from it (`Outcome`)."""

from dataclasses import dataclass, field
from datetime import timedelta


@dataclass(frozen=True)
class Answered:
    """The receiver answered with an HTTP status."""

    status: int
    retry_after: str | None = None


@dataclass(frozen=True)
class Unreachable:
    """No answer; `timed_out` says that the attempt used up its time."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True)
class Unsendable:
    """The same attempt would fail again: the URL cannot be used."""

    reason: str


@dataclass(frozen=True)
class NotAllowed:
    """The address is one that webhooks must not reach; nothing was connected. `address` is for the operator only."""

    address: str = field(default="", compare=False)


Answer = Answered | Unreachable | Unsendable | NotAllowed

ADDRESS_NOT_ALLOWED = "address not allowed"
HOW_TO_ALLOW = "LORAQ_WEBHOOK_ALLOW_NETWORKS lets networks through"


@dataclass(frozen=True)
class Delivered:
    """The receiver took it (2xx)."""


@dataclass(frozen=True)
class Retry:
    """Try again after that time."""

    after: timedelta
    reason: str


@dataclass(frozen=True)
class Failed:
    """Given up for good."""

    reason: str


@dataclass(frozen=True)
class Blocked:
    """Given up: the address is not allowed. The tenant learns no more than that."""

    reason: str = ADDRESS_NOT_ALLOWED


Outcome = Delivered | Retry | Failed | Blocked
