"""Feeds the breaker with outcomes and rejections, and pauses and resumes consumption accordingly.

It also pauses consumption while no tenant is registered in the database: every record would be dead-lettered.
"""

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from schemas.common import SUSPECT_CODES
from services.client.signing import SIGNATURE_HEADER, signature
from services.parsing.validation import stated_identity
from services.process import telemetry
from services.process.lifecycle import Health
from services.worker.intake.pressure import Pressure
from services.worker.intake.records import TenantKey
from services.worker.jobs import Outcome, Rejection
from services.worker.store.persistence import Persistence
from services.worker.supervision.breaker import Breaker, BreakerLimits, BreakerState

TICK_S = 0.25
MAX_TRACED = 200
"""Rejections per tick that are traced to their tenants; of a flood, a sample suffices."""
MAX_READ_BYTES = 64 * 1024
"""Larger values are traced by their keys only: parsing them again is expensive."""
BREAKER, NO_TENANT = "breaker", "no tenant"
STATE_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}
_log = telemetry.get_logger()

TenantsOf = Callable[[set[str]], Awaitable[Mapping[str, TenantKey]]]


class Guard:
    """Owns the breaker. `pressure` is the consumer's; consumption is paused until a tenant is registered."""

    def __init__(
        self,
        limits: BreakerLimits,
        tenants_of: TenantsOf,
        any_tenant: Callable[[], Awaitable[bool]],
        persistence: Persistence,
        health: Health,
        pressure: Pressure,
        *,
        require_signature: bool,
    ) -> None:
        self._limits = limits
        self._breaker = Breaker(limits)
        self._tenants_of = tenants_of
        self._any_tenant = any_tenant
        self._persistence = persistence
        self._health = health
        self._pressure = pressure
        self._require_signature = require_signature
        self._rejected: deque[Rejection] = deque(maxlen=MAX_TRACED)
        self._latest = ""
        pressure.pause(NO_TENANT)

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of a job."""
        bad = outcome.error is not None and outcome.error.code in SUSPECT_CODES
        if bad and outcome.error is not None:
            self._latest = f"{outcome.error.code}: {outcome.error.message}"
        self._breaker.record(outcome.job.key.tenant, time.monotonic(), bad=bad)

    def rejected(self, rejection: Rejection) -> None:
        """Queue a rejection; the next tick traces it to its tenant."""
        self._rejected.append(rejection)

    async def run(self) -> None:
        """Wait for a tenant, then update the breaker until cancelled."""
        await self._wait_for_tenant()
        while True:
            await asyncio.sleep(TICK_S)
            await self._trace_rejections()
            before = self._breaker.state
            after = self._breaker.tick(time.monotonic())
            if after is not before:
                self._changed(after)

    async def _wait_for_tenant(self) -> None:
        warned = False
        while not await self._persistence.retry_until_done(self._any_tenant):
            if not warned:
                sentence = "No tenant is registered in this database; consumption is paused"
                _log.warning(sentence, action="no_tenant", hint="`loraq tenants add`, or check LORAQ_DATABASE_URL")
                warned = True
            await asyncio.sleep(1.0)
        self._pressure.resume(NO_TENANT)

    async def _trace_rejections(self) -> None:
        rejected, self._rejected = list(self._rejected), deque(maxlen=MAX_TRACED)
        named = [(each, name) for each in rejected if (name := _tenant(each))]
        if not named:
            return
        tenants = await self._persistence.retry_until_done(partial(self._tenants_of, {name for _, name in named}))
        for rejection, name in named:
            if (tenant := tenants.get(name)) is not None and self._counts_for(rejection, tenant):
                self._latest = f"{rejection.code}: {rejection.message}"
                self._breaker.record(name, time.monotonic(), bad=True)

    def _counts_for(self, rejection: Rejection, tenant: TenantKey) -> bool:
        """Whether a rejection counts for the tenant; where signatures are required, only if its signature is valid."""
        if tenant.disabled or not self._require_signature:
            return not tenant.disabled
        if tenant.key is None:
            return False
        sent = (rejection.record.header(SIGNATURE_HEADER) or b"").lower()
        return hmac.compare_digest(sent, signature(tenant.key, rejection.record.value or b"").encode())

    def _changed(self, state: BreakerState) -> None:
        telemetry.BREAKER_STATE.set(STATE_NUMBERS[state])
        self._pressure.narrow(self._limits.probe_jobs if state is BreakerState.PROBING else None)
        match state:
            case BreakerState.OPEN:
                self._open()
            case BreakerState.PROBING:
                self._pressure.resume(BREAKER)
                _log.warning("The breaker probes with a few jobs", action="breaker_probing")
            case BreakerState.CLOSED:
                self._health.set(BREAKER, None)
                _log.warning("Jobs succeed again; the breaker is closed", action="breaker_closed")

    def _open(self) -> None:
        self._pressure.pause(BREAKER)
        delay_s = self._breaker.open_until - time.monotonic()
        evidence = self._breaker.evidence
        share = f"{evidence.bad / evidence.jobs:.0%} of the last jobs of {evidence.tenants} tenants"
        reason = f"{share} failed or were dead-lettered; consumption is paused; the latest: {self._latest}"
        self._health.set(BREAKER, reason)
        telemetry.alarm(
            _log,
            "Most jobs fail: consumption paused",
            action="breaker_open",
            reason=reason,
            probe_in_s=round(delay_s),
        )


def _tenant(rejection: Rejection) -> str | None:
    """The tenant that a record names, not authenticated."""
    value = rejection.record.value or b""
    tenant, *_ = stated_identity(rejection.record.key, value if len(value) <= MAX_READ_BYTES else None)
    return tenant
