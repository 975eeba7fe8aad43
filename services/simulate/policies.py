"""The policies that are compared: the worker's own backlog under several rules. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.common import Lane
from services.worker.queue.backlog import LaneRules
from services.worker.queue.pace import Pace

ENDLESS = float("inf")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker orders its jobs.

    `rules` are fixed; without them they follow the measured pace, as a worker's do by default. A policy that is not
    `affine` does not look at which adapters are where; with `looks_ahead` the engine is told what the queue wants.
    """

    name: str
    rules: Mapping[Lane, LaneRules] | None = None
    affine: bool = True
    looks_ahead: bool = True

    def pace(self) -> Pace | None:
        """What measures the pace of one worker; None with fixed rules."""
        return Pace({}) if self.rules is None else None


def _all_lanes(rules: LaneRules) -> dict[Lane, LaneRules]:
    return dict.fromkeys(Lane, rules)


FIRST_COME = Policy("first-come", _all_lanes(LaneRules(0.0, ENDLESS)), affine=False, looks_ahead=False)
"""Lanes by weight, jobs in order of arrival; no shares of tenants."""
UNBOUNDED = Policy("unbounded", _all_lanes(LaneRules(ENDLESS, ENDLESS)))
"""Jobs of adapters that are here go first, however long others wait; no shares of tenants."""
LORAQ = Policy("loraq")
"""The defaults of a worker: 2, 10 and 60 s of the measured rate, and shares of tenants."""


def bounded(tokens: int) -> Policy:
    """The same bound for every lane, in tokens, as `loraq bench scheduling` sets it; 0 is first come, first served."""
    name = f"bound {tokens}" if tokens else "first come"
    return Policy(name, _all_lanes(LaneRules(float(tokens))), looks_ahead=tokens > 0)


def policy_of(name: str) -> Policy:
    """A policy by its name, or by a bound in tokens. Raises ValueError if it is neither."""
    named = {policy.name: policy for policy in (FIRST_COME, UNBOUNDED, LORAQ)}
    return named[name] if name in named else bounded(int(name))
