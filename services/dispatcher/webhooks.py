"""Claims due webhooks within the free slots, sends each in its own task, and records every attempt."""

import asyncio
import random
import time
from dataclasses import dataclass
from datetime import timedelta

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from services.dispatcher.outbox import Outbox, WebhookRow, delivery_outcome
from services.dispatcher.schedule import RetryPolicy, decide
from services.dispatcher.sender import Sender
from services.dispatcher.slots import HostSlots
from services.dispatcher.wakeup import first_of
from services.errors import ConfigError, InputError, RetryableError
from services.process import telemetry
from services.process.lifecycle import Health
from services.tenants.secrets import SecretBox
from services.webhooks.outcome import (
    HOW_TO_ALLOW,
    AttemptResult,
    Blocked,
    Delivered,
    Failed,
    NotAllowed,
    Outcome,
    Responded,
    Unreachable,
)

MAX_CLAIM = 100
CLAIM_SLACK = timedelta(seconds=30)
RECORD_PAUSES_S = (0.1, 1.0, 5.0)  # together well within the slack
UNUSABLE_SECRET = "the tenant's webhook secret is unusable; the operator has been alerted"  # noqa: S105  # a sentence
INTERNAL_ERROR = "the attempt failed with an internal error; the operator has been alerted"
_log = telemetry.get_logger()


@dataclass(frozen=True)
class WebhookTimings:
    """The timeout of an attempt, the polling interval, and how long a stop waits for attempts in flight."""

    timeout: timedelta
    poll_interval_s: float
    drain_s: float


class WebhookLoop:
    """Runs until stopped. Setting `wake` makes it look for due webhooks now."""

    def __init__(
        self,
        outbox: Outbox,
        sender: Sender,
        box: SecretBox,
        slots: HostSlots,
        policy: RetryPolicy,
        timings: WebhookTimings,
    ) -> None:
        self.wake = asyncio.Event()
        self._outbox = outbox
        self._sender = sender
        self._box = box
        self._slots = slots
        self._policy = policy
        self._timings = timings
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots_exhausted = False

    async def run(self, stop: asyncio.Event, health: Health) -> None:
        """Send until `stop`; then wait at most `drain_s` seconds for attempts in flight."""
        while not stop.is_set():
            self.wake.clear()
            try:
                started = await self._start_due()
                health.set("webhooks", None)
            except RetryableError as error:
                health.set("webhooks", str(error))
                _log.warning("Webhooks cannot be claimed", action="webhooks_held_up", reason=str(error))
                await first_of(stop, timeout_s=max(1.0, self._timings.poll_interval_s))
                continue
            if not started:
                await first_of(stop, self.wake, timeout_s=self._timings.poll_interval_s)
        await self._drain()

    async def _start_due(self) -> int:
        """Claim due webhooks within the free slots and start them; returns the number of attempts started."""
        capacity = self._slots.capacity(MAX_CLAIM)
        self._slots_exhausted = capacity.total <= 0 or 0 in capacity.by_host.values()
        if capacity.total <= 0:
            return 0
        rows = await self._outbox.claim_webhooks(capacity, self._timings.timeout + CLAIM_SLACK)
        surplus = [row for row in rows if not self._start(row)]
        await self._outbox.release_webhooks(surplus)
        return len(rows) - len(surplus)

    def _start(self, row: WebhookRow) -> bool:
        if not self._slots.acquire(row.host):
            return False
        task = asyncio.create_task(self._attempt(row), name=f"webhook {row.event_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _drain(self) -> None:
        """Attempts that are cancelled keep their claims; another dispatcher sends them once those expire."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timings.drain_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attempt(self, row: WebhookRow) -> None:
        timed_out = False
        telemetry.WEBHOOKS_IN_FLIGHT.inc()
        try:
            timed_out = await self._send_and_record(row)
        except RetryableError as error:
            _log.warning(
                "Webhook attempt could not be recorded and will be repeated",
                action="webhook_not_recorded",
                webhook_id=str(row.event_id),
                reason=str(error),
            )
        except Exception as error:
            telemetry.alarm(
                _log,
                "Webhook attempt failed unexpectedly and will be repeated",
                action="webhook_broke",
                webhook_id=str(row.event_id),
                reason=repr(error),
                exc_info=error,
            )
        finally:
            telemetry.WEBHOOKS_IN_FLIGHT.dec()
            self._slots.release(row.host, timed_out)
            if self._slots_exhausted:
                self.wake.set()

    async def _send_and_record(self, row: WebhookRow) -> bool:
        """Make one attempt and record it; returns whether it timed out."""
        with telemetry.tracer().start_as_current_span(
            telemetry.SPAN_SEND_WEBHOOK,
            context=telemetry.context_from(row.traceparent),
            kind=SpanKind.CLIENT,
            attributes=_attributes(row),
        ) as span:
            start = time.monotonic()
            result = await self._send(row)
            duration = timedelta(seconds=time.monotonic() - start)
            outcome = self._outcome(row, result, duration)
            _describe(span, result, outcome)
            await self._record(row, outcome, _status(result), duration)
            _report(row, result, outcome, duration)
            return isinstance(result, Unreachable) and result.timed_out

    async def _record(self, row: WebhookRow, outcome: Outcome, status: int | None, duration: timedelta) -> None:
        """Record the attempt, with retries: a brief database outage should not make the receiver get it twice."""
        for pause_s in RECORD_PAUSES_S:
            try:
                return await self._outbox.finish_webhook(row, outcome, status, duration)
            except RetryableError:
                await asyncio.sleep(pause_s)
        return await self._outbox.finish_webhook(row, outcome, status, duration)

    async def _send(self, row: WebhookRow) -> AttemptResult:
        """Send it. An unusable secret is the operator's fault: it raises an alarm, and the webhook is retried."""
        try:
            if row.sealed_secret is None:
                raise ConfigError(f"the tenant {row.tenant} has no webhook secret")
            secret = self._box.open(row.sealed_secret).decode()
            return await self._sender.send(row.target, str(row.event_id), row.body.encode(), secret, row.claimed_at)
        except (ConfigError, InputError, UnicodeDecodeError) as error:
            telemetry.alarm(
                _log,
                "Webhook secret is unusable",
                action="webhook_secret_unusable",
                tenant=row.tenant,
                webhook_id=str(row.event_id),
                reason=str(error),
            )
            return Unreachable(UNUSABLE_SECRET)
        except Exception as error:  # it counts as an attempt, so that the retries end
            telemetry.alarm(
                _log,
                "Webhook attempt failed unexpectedly",
                action="webhook_broke",
                tenant=row.tenant,
                webhook_id=str(row.event_id),
                reason=repr(error),
                exc_info=error,
            )
            return Unreachable(INTERNAL_ERROR)

    def _outcome(self, row: WebhookRow, result: AttemptResult, duration: timedelta) -> Outcome:
        return decide(
            result,
            attempt=row.tries,
            started_at=row.schedule_started_at,
            policy=self._policy,
            now=row.claimed_at + duration,
            random=random.random(),
        )


def _attributes(row: WebhookRow) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        telemetry.HTTP_REQUEST_METHOD: "POST",
        telemetry.SERVER_ADDRESS: row.host,
        telemetry.TENANT: row.tenant,
        telemetry.JOB_ID: str(row.job_id),
        telemetry.EVENT_ID: str(row.event_id),
        telemetry.ATTEMPT: row.attempts,
    }
    if row.attempts > 1:
        attributes[telemetry.HTTP_REQUEST_RESEND_COUNT] = row.attempts - 1
    return attributes


def _status(result: AttemptResult) -> int | None:
    return result.status if isinstance(result, Responded) else None


def _describe(span: Span, result: AttemptResult, outcome: Outcome) -> None:
    span.set_attribute(telemetry.OUTCOME, delivery_outcome(outcome))
    if (status := _status(result)) is not None:
        span.set_attribute(telemetry.HTTP_RESPONSE_STATUS_CODE, status)
    if not isinstance(outcome, Delivered):
        span.set_attribute(telemetry.ERROR_TYPE, str(status or type(result).__name__))
        span.set_status(Status(StatusCode.ERROR, outcome.reason))


def _report(row: WebhookRow, result: AttemptResult, outcome: Outcome, duration: timedelta) -> None:
    """Count and log the attempt. Unlike the tenant's row, the log names the refused address and how to allow it."""
    label = delivery_outcome(outcome)
    telemetry.WEBHOOK_ATTEMPTS.labels(outcome=label).inc()
    telemetry.WEBHOOK_SECONDS.observe(duration.total_seconds())
    log = _log.warning if isinstance(outcome, Failed | Blocked) else _log.info
    log(
        "Webhook attempted",
        action=f"webhook_{label}",
        webhook_id=str(row.event_id),
        tenant=row.tenant,
        job_id=str(row.job_id),
        attempt=row.attempts,
        status=_status(result),
        reason=getattr(outcome, "reason", None),
        refused_address=result.address if isinstance(result, NotAllowed) else None,
        hint=HOW_TO_ALLOW if isinstance(result, NotAllowed) else None,
        duration_ms=round(duration / timedelta(milliseconds=1), 1),
    )
