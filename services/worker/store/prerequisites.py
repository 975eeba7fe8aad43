"""The adapters and webhook endpoints that a batch refers to, and why a job cannot run without them."""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpg import Record as Row

from schemas.common import AdapterStatus, ErrorCode
from schemas.events import JobError
from services.adapters.versions import AdapterVersion, resolve
from services.postgres.pool import Connection
from services.webhooks.endpoints import resolve_endpoints
from services.worker.jobs import Candidate, JobKey


@dataclass(frozen=True, slots=True)
class Prerequisites:
    """The registered adapters and endpoints that a batch refers to."""

    adapters: dict[tuple[str, str], AdapterVersion]
    endpoints: dict[tuple[str, str], str]

    def adapter_of(self, candidate: Candidate, ref: str | None) -> AdapterVersion | None:
        """The adapter version that `ref` resolves to for the candidate's tenant, in any status."""
        return self.adapters.get((candidate.key.tenant, ref)) if ref else None

    def webhook_url(self, candidate: Candidate) -> str | None:
        """The URL of the job's webhook; None without a webhook or for an unknown endpoint."""
        webhook = candidate.request.webhook
        if webhook is None:
            return None
        if webhook.url is not None:
            return str(webhook.url)
        assert webhook.endpoint is not None
        return self.endpoints.get((candidate.key.tenant, webhook.endpoint))


def adapter_name(candidate: Candidate) -> str | None:
    """The requested adapter's name, without version."""
    ref = candidate.request.adapter
    return ref.split("@")[0] if ref else None


def adapter_ref(candidate: Candidate, row: Row | None) -> str | None:
    """The reference to resolve: as sent, or with the version that the job's first claim fixed."""
    if row is None or row["adapter_version"] is None:
        return candidate.request.adapter
    return f"{adapter_name(candidate)}@{row['adapter_version']}"


def version_of(adapter: AdapterVersion | None) -> int | None:
    """The adapter's version; None for the base model."""
    return adapter.version if adapter else None


async def look_up(
    connection: Connection, candidates: Sequence[Candidate], refs: dict[JobKey, str | None]
) -> Prerequisites:
    """Look up the adapters and endpoints of a whole batch at once."""
    wanted = {(key.tenant, ref) for key, ref in refs.items() if ref is not None}
    endpoints = {
        (candidate.key.tenant, webhook.endpoint)
        for candidate in candidates
        if (webhook := candidate.request.webhook) is not None and webhook.endpoint is not None
    }
    adapters = await resolve(connection, wanted) if wanted else {}
    return Prerequisites(adapters, await resolve_endpoints(connection, endpoints) if endpoints else {})


def adapter_failure(candidate: Candidate, ref: str | None, adapter: AdapterVersion | None) -> JobError | None:
    """Why the job cannot run with its adapter; None if it can."""
    if ref is None:
        return None
    tenant = candidate.key.tenant
    if adapter is None:
        message = f"tenant {tenant!r} has no adapter {candidate.request.adapter!r}; push it with `loraq adapters push`"
        return JobError(code=ErrorCode.UNKNOWN_ADAPTER, message=message)
    if adapter.status is AdapterStatus.READY:
        return None
    reason = f": {adapter.status_reason}" if adapter.status_reason else ""
    message = f"adapter '{adapter.name}@{adapter.version}' of tenant {tenant!r} is {adapter.status}{reason}"
    return JobError(code=ErrorCode.ADAPTER_NOT_READY, message=message)


def webhook_failure(candidate: Candidate, url: str | None) -> JobError | None:
    """Why the job's webhook cannot be sent; None if it can."""
    webhook = candidate.request.webhook
    if webhook is None or url is not None:
        return None
    message = (
        f"field 'webhook.endpoint': tenant {candidate.key.tenant!r} has no active endpoint {webhook.endpoint!r};"
        " add it with `loraq endpoints add`"
    )
    return JobError(code=ErrorCode.INVALID_MESSAGE, message=message)
