"""Cancellation: the value of a record on `<prefix>.<pool>.control`, keyed by tenant."""

from uuid import UUID

from schemas.common import Strict, TenantName


class Cancellation(Strict):
    """Requests the cancellation of one job; a job that no worker has read yet is cancelled when it arrives."""

    tenant: TenantName
    job_id: UUID
