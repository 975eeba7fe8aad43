"""Cancellation: the value of a record on `<prefix>.<pool>.control`, keyed by tenant."""

from uuid import UUID

from schemas.common import Strict, TenantName


class Cancellation(Strict):
    """Asks for one job to be cancelled; a job not yet seen is cancelled when it arrives."""

    tenant: TenantName
    job_id: UUID
