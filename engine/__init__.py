"""The multi-LoRA engine. Depends only on torch, triton, safetensors, tokenizers, jinja2 and numpy.

This module is the public API. Importing it does not import torch; the first use of `Engine` or `CheckedAdapter` does.
"""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import (
    AdapterError,
    AdapterInUseError,
    ConfigurationError,
    EngineError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    RequestError,
    UnknownAdapterError,
)
from engine.files.digest import adapter_digest, model_fingerprint
from engine.files.model_config import ModelConfig, read_model_config
from engine.lora.peft import check_adapter
from engine.types import (
    AdapterInfo,
    AdapterTraffic,
    FinishReason,
    Output,
    PreparedRequest,
    Request,
    SamplingParams,
    StepStats,
    Usage,
)

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.lora.checked import CheckedAdapter

__all__ = [
    "AdapterError",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterTraffic",
    "CheckedAdapter",
    "ConfigurationError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "ModelConfig",
    "ModelError",
    "Output",
    "PreparedRequest",
    "PromptTooLongError",
    "Request",
    "RequestError",
    "SamplingParams",
    "StepStats",
    "UnknownAdapterError",
    "Usage",
    "adapter_digest",
    "check_adapter",
    "model_fingerprint",
    "read_model_config",
]


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use (PEP 562)."""
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    if name == "CheckedAdapter":
        from engine.lora.checked import CheckedAdapter

        return CheckedAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
