"""What the registry knows about what a batch asks for, and why a job cannot run with it."""

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
class Means:
    """What the registry knows about what a batch asks for."""

    adapters: dict[tuple[str, str], AdapterVersion]
    endpoints: dict[tuple[str, str], str]

    def adapter_of(self, candidate: Candidate, ref: str | None) -> AdapterVersion | None:
        """The adapter version that `ref` names for the candidate's tenant, whatever its status."""
        return self.adapters.get((candidate.key.tenant, ref)) if ref else None

    def webhook_url(self, candidate: Candidate) -> str | None:
        """Where the job's webhook goes."""
        webhook = candidate.request.webhook
        if webhook is None:
            return None
        if webhook.url is not None:
            return str(webhook.url)
        assert webhook.endpoint is not None
        return self.endpoints.get((candidate.key.tenant, webhook.endpoint))


def adapter_name(candidate: Candidate) -> str | None:
    """The adapter's name as asked for, without version."""
    ref = candidate.request.adapter
    return ref.split("@")[0] if ref else None


def adapter_ref(candidate: Candidate, row: Row | None) -> str | None:
    """What to resolve: the reference as sent, or the version that was fixed when the job was first taken."""
    if row is None or row["adapter_version"] is None:
        return candidate.request.adapter
    return f"{adapter_name(candidate)}@{row['adapter_version']}"


def version_of(adapter: AdapterVersion | None) -> int | None:
    """None for the base model."""
    return adapter.version if adapter else None


async def look_up(connection: Connection, candidates: Sequence[Candidate], refs: dict[JobKey, str | None]) -> Means:
    """Ask the registry once for the whole batch."""
    wanted = {(key.tenant, ref) for key, ref in refs.items() if ref is not None}
    endpoints = {
        (candidate.key.tenant, webhook.endpoint)
        for candidate in candidates
        if (webhook := candidate.request.webhook) is not None and webhook.endpoint is not None
    }
    adapters = await resolve(connection, wanted) if wanted else {}
    return Means(adapters, await resolve_endpoints(connection, endpoints) if endpoints else {})


def adapter_doom(candidate: Candidate, ref: str | None, adapter: AdapterVersion | None) -> JobError | None:
    """Why the job's adapter cannot serve it."""
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


def webhook_doom(candidate: Candidate, url: str | None) -> JobError | None:
    """Why the job's webhook could never be sent."""
    webhook = candidate.request.webhook
    if webhook is None or url is not None:
        return None
    message = (
        f"field 'webhook.endpoint': tenant {candidate.key.tenant!r} has no active endpoint {webhook.endpoint!r};"
        " add it with `loraq endpoints add`"
    )
    return JobError(code=ErrorCode.INVALID_MESSAGE, message=message)
