"""JobRequest: the value of a record on `<prefix>.<pool>.jobs.<lane>`."""

from math import isfinite
from operator import attrgetter
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    AwareDatetime,
    ConfigDict,
    Field,
    JsonValue,
    UrlConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_json

from schemas.common import MAX_METADATA_BYTES, AdapterRef, EndpointName, Strict, TenantName, exactly_one

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_URL_CHARS = 2048


def _short_url(url: AnyHttpUrl) -> AnyHttpUrl:
    # The length that is requested and stored: percent-encoding makes a URL up to nine times longer.
    if (length := len(str(url))) > MAX_URL_CHARS:
        raise ValueError(f"the URL has {length} characters when percent-encoded; at most {MAX_URL_CHARS} are allowed")
    return url


WebhookUrl = Annotated[AnyHttpUrl, UrlConstraints(max_length=MAX_URL_CHARS), AfterValidator(_short_url)]


def _path_of_non_finite(value: JsonValue, path: str) -> str | None:
    """Path of the first NaN or infinity in the value, names and indices joined by dots; None if there is none."""
    if isinstance(value, float):
        return None if isfinite(value) else path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_path_of_non_finite(item, f"{path}.{name}") for name, item in items)
    return next((each for each in found if each is not None), None)


class ChatMessage(Strict):
    """One turn of a conversation; the base model's chat template renders the list."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(Strict):
    """How tokens are sampled. The default is greedy decoding of at most 128 tokens."""

    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 128
    temperature: Annotated[float, Field(ge=0.0, le=10.0, description="0 is greedy")] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 is off")] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_STOP_STRINGS)] = (
        Field(default_factory=list)
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    ignore_eos: bool = False


SAMPLING_SCALARS = tuple(name for name in Sampling.model_fields if name != "stop")
sampling_scalars = attrgetter(*SAMPLING_SCALARS)
"""Values of a Sampling in the order of `SAMPLING_SCALARS`; together with its stop strings they are a cache key."""


class WebhookTarget(Strict):
    """Destination of the signed webhook: a URL, or the name of an endpoint that the tenant registered."""

    model_config = ConfigDict(json_schema_extra=exactly_one({"url": "string", "endpoint": "string"}))

    url: WebhookUrl | None = None
    endpoint: EndpointName | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.url is None) == (self.endpoint is None):
            raise ValueError("give exactly one of url and endpoint")
        return self


class JobRequest(Strict):
    """One inference job. Set exactly one of `prompt`, `messages` and `prompt_token_ids`.

    As JSON, the value of a record, it has at most 1,048,576 bytes.
    """

    model_config = ConfigDict(
        json_schema_extra=exactly_one({"prompt": "string", "messages": "array", "prompt_token_ids": "array"})
    )

    job_id: UUID | None = None
    tenant: TenantName
    adapter: AdapterRef | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)] | None = None
    sampling: Sampling = Sampling()
    deadline: AwareDatetime | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = None
    webhook: WebhookTarget | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _metadata_fits(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        try:
            encoded = to_json(metadata)
        except PydanticSerializationError as error:
            raise ValueError(f"metadata contains a lone surrogate, which UTF-8 cannot encode: {error}") from error
        if len(encoded) > MAX_METADATA_BYTES:
            raise ValueError(f"metadata is {len(encoded)} bytes as JSON; at most {MAX_METADATA_BYTES} are allowed")
        if b"\\u0000" in encoded.replace(b"\\\\", b""):
            raise ValueError("metadata contains the character U+0000, which a jsonb column cannot store")
        # The words may be part of a string, so only walking the value is certain; most metadata does not need it.
        if (b"NaN" in encoded or b"Infinity" in encoded) and (path := _path_of_non_finite(metadata, "metadata")):
            raise ValueError(f"{path} is not a finite number, which JSON requires")
        return metadata

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) + (self.messages is None) + (self.prompt_token_ids is None) != 2:
            given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
            found = " and ".join(given) if given else "none"
            raise ValueError(f"give exactly one of prompt, messages and prompt_token_ids; found {found}")
        return self
