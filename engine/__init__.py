"""The multi-LoRA engine: torch, triton, safetensors, tokenizers, jinja2 and numpy only.

This module is the public surface. Importing it does not import torch.
"""

from engine.config import EngineConfig
from engine.digest import adapter_digest, model_fingerprint
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
from engine.lora.peft import check_adapter
from engine.model.config import ModelConfig, read_model_config
from engine.types import AdapterInfo, FinishReason, Output, Request, SamplingParams, Usage

__all__ = [
    "AdapterError",
    "AdapterInUseError",
    "AdapterInfo",
    "ConfigurationError",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "ModelConfig",
    "ModelError",
    "Output",
    "PromptTooLongError",
    "Request",
    "RequestError",
    "SamplingParams",
    "UnknownAdapterError",
    "Usage",
    "adapter_digest",
    "check_adapter",
    "model_fingerprint",
    "read_model_config",
]
