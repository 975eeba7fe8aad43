"""The closed vocabulary that every message, row and payload shares."""

from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_METADATA_BYTES = 16 * 1024
MAX_INLINE_OUTPUT_BYTES = 64 * 1024


class Strict(BaseModel):
    """Base of every boundary model: it refuses unknown fields and wrong types by name; instances are frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def exactly_one(json_types: dict[str, str]) -> dict[str, JsonValue]:
    """JSON Schema for "exactly one of these fields is present and not null"; maps each field to its JSON type."""
    return {"oneOf": [{"required": [name], "properties": {name: {"type": kind}}} for name, kind in json_types.items()]}


class Lane(StrEnum):
    """Priority class of a job; each lane of a pool is one topic."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class JobState(StrEnum):
    """State of a job; it never leaves a state of `TERMINAL_STATES`."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})


class WaitReason(StrEnum):
    """Why a job waits."""

    ADAPTER_LOADING = "adapter_loading"
    TENANT_LIMIT = "tenant_limit"
    TENANT_OVER_SHARE = "tenant_over_share"
    OVERTAKEN_FOR_AFFINITY = "overtaken_for_affinity"
    ENGINE_FULL = "engine_full"


class OverLimit(StrEnum):
    """What happens to a job of a tenant at its limit."""

    WAIT = "wait"
    REFUSE = "refuse"


class AdapterStatus(StrEnum):
    """Status of an adapter version in its admission."""

    PENDING = "pending"
    READY = "ready"
    REJECTED = "rejected"
    DISABLED = "disabled"


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


class ErrorCode(StrEnum):
    """Stable error codes; `ERROR_SENTENCES` describes them."""

    INVALID_MESSAGE = "invalid_message"
    ID_CONFLICT = "id_conflict"
    UNAUTHENTICATED = "unauthenticated"
    UNKNOWN_ADAPTER = "unknown_adapter"
    ADAPTER_NOT_READY = "adapter_not_ready"
    ADAPTER_LOAD_FAILED = "adapter_load_failed"
    ADAPTER_LOAD_TIMEOUT = "adapter_load_timeout"
    PROMPT_TOO_LONG = "prompt_too_long"
    LIMIT_EXCEEDED = "limit_exceeded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"
    RESULT_TOO_LARGE = "result_too_large"


ERROR_SENTENCES: dict[ErrorCode, str] = {
    ErrorCode.INVALID_MESSAGE: "The request is invalid; the message names the field. In a row: an unknown endpoint.",
    ErrorCode.ID_CONFLICT: "This job_id was already used by the tenant for a different request.",
    ErrorCode.UNAUTHENTICATED: "The tenant is not registered, or the signature is missing, wrong or cannot be checked.",
    ErrorCode.UNKNOWN_ADAPTER: "The tenant has no adapter of this name and version.",
    ErrorCode.ADAPTER_NOT_READY: "The adapter exists but is pending, rejected or disabled.",
    ErrorCode.ADAPTER_LOAD_FAILED: "The adapter's files could not be fetched, verified or loaded.",
    ErrorCode.ADAPTER_LOAD_TIMEOUT: "The adapter was not loaded within the load timeout.",
    ErrorCode.PROMPT_TOO_LONG: "Prompt and max_tokens together exceed the model's context or the engine's memory.",
    ErrorCode.LIMIT_EXCEEDED: "The tenant is at its limit, which is set to refuse jobs; the message names the limit.",
    ErrorCode.DEADLINE_EXCEEDED: "The deadline passed before the job was started.",
    ErrorCode.TIMEOUT: "The job ran longer than its timeout_ms.",
    ErrorCode.CANCELLED: "The job was cancelled on request.",
    ErrorCode.ENGINE_ERROR: "The engine failed on this job as often as its attempts allow.",
    ErrorCode.RESULT_TOO_LARGE: "The output is larger than LORAQ_MAX_RESULT_BYTES.",
}


class Fault(StrEnum):
    """Whose fault an error is, and who can fix it."""

    JOB = "the job"
    ADAPTER = "the adapter"
    SERVICE = "loraq"
    INFRASTRUCTURE = "the infrastructure"


class ErrorClass(NamedTuple):
    """Whose fault an error is, whether loraq retries before it fails the job, and whether `attempts` counts it."""

    fault: Fault
    retried: bool
    charged: bool


ERROR_CLASSES: dict[ErrorCode, ErrorClass] = {
    ErrorCode.INVALID_MESSAGE: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.ID_CONFLICT: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.UNAUTHENTICATED: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.UNKNOWN_ADAPTER: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.ADAPTER_NOT_READY: ErrorClass(Fault.ADAPTER, retried=False, charged=False),
    ErrorCode.ADAPTER_LOAD_FAILED: ErrorClass(Fault.ADAPTER, retried=False, charged=False),
    ErrorCode.ADAPTER_LOAD_TIMEOUT: ErrorClass(Fault.INFRASTRUCTURE, retried=True, charged=False),
    ErrorCode.PROMPT_TOO_LONG: ErrorClass(Fault.JOB, retried=False, charged=True),
    ErrorCode.LIMIT_EXCEEDED: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.DEADLINE_EXCEEDED: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.TIMEOUT: ErrorClass(Fault.JOB, retried=False, charged=True),
    ErrorCode.CANCELLED: ErrorClass(Fault.JOB, retried=False, charged=False),
    ErrorCode.ENGINE_ERROR: ErrorClass(Fault.SERVICE, retried=True, charged=True),
    ErrorCode.RESULT_TOO_LARGE: ErrorClass(Fault.JOB, retried=False, charged=True),
}
SUSPECT_CODES = frozenset({ErrorCode.ADAPTER_LOAD_FAILED, ErrorCode.ADAPTER_LOAD_TIMEOUT, ErrorCode.ENGINE_ERROR})
"""Failures that indicate a problem of the service when most jobs of several tenants end in them."""

NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$"
ADAPTER_REF_PATTERN = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?(?:@[1-9][0-9]{0,8})?$"

TenantName = Annotated[str, Field(pattern=NAME_PATTERN, description="Tenant: 1 to 64 of a-z 0-9 . _ -")]
AdapterName = Annotated[
    str, Field(pattern=NAME_PATTERN, description="Adapter without version: 1 to 64 of a-z 0-9 . _ -")
]
EndpointName = Annotated[str, Field(pattern=NAME_PATTERN, description="Endpoint: 1 to 64 of a-z 0-9 . _ -")]
AdapterRef = Annotated[
    str, Field(pattern=ADAPTER_REF_PATTERN, description="`name`: its newest active version; `name@3`: that one")
]
