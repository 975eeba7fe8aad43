"""ModelConfig: the configuration of a Llama-family model, parsed from its config.json. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LINEAR_PROJECTIONS = ATTENTION_PROJECTIONS + MLP_PROJECTIONS
EMBEDDING = "embed_tokens"
LM_HEAD = "lm_head"

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
DEFAULT_ROPE_THETA: dict[Family, float] = {"smollm3": 2_000_000.0}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `kind` linear divides positions by `factor`; llama3 scales the long wavelengths."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Module:
    """A module that adapters can adapt; `layer` is None for the embedding and the head.

    The weight is (out_features, in_features); the embedding's is (vocabulary, hidden).
    """

    layer: int | None
    projection: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the decoder. `windows[i]` is layer i's sliding window in tokens, or None."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary_layers: tuple[bool, ...]
    eos_token_ids: frozenset[int]

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def width(self, projection: str) -> int:
        """Output features of a layer's projection."""
        return self.modules[f"model.layers.0.{_block(projection)}.{projection}"].out_features

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """Every adaptable module by its Hugging Face name, such as `model.layers.0.self_attn.q_proj`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = {
            "self_attn.q_proj": (self.q_size, hidden),
            "self_attn.k_proj": (self.kv_size, hidden),
            "self_attn.v_proj": (self.kv_size, hidden),
            "self_attn.o_proj": (hidden, self.q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        modules = {
            f"model.layers.{layer}.{name}": Module(layer, name.rsplit(".", 1)[1], *shape)
            for layer in range(self.num_layers)
            for name, shape in shapes.items()
        }
        modules[f"model.{EMBEDDING}"] = Module(None, EMBEDDING, self.vocab_size, hidden)
        modules[LM_HEAD] = Module(None, LM_HEAD, self.vocab_size, hidden)
        return modules


def _block(projection: str) -> str:
    return "self_attn" if projection in ATTENTION_PROJECTIONS else "mlp"


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json, and end-of-sequence ids from generation_config.json; raises ModelError naming file or field."""
    raw = _read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    defaults = _read_json(generation) if generation.is_file() else {}
    try:
        _check_sizes(raw)
        config = _parse(raw, defaults)
    except KeyError as error:
        raise ModelError(
            f"{model_dir / 'config.json'} has no field {error}; it must be a decoder model's configuration"
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{model_dir / 'config.json'} has an invalid value: {error}") from error
    if config.head_dim % 2:
        raise ModelError(f"{model_dir / 'config.json'}: head_dim is {config.head_dim}; it must be even")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{model_dir / 'config.json'}: num_attention_heads, {config.num_heads}, must be a multiple of "
            f"num_key_value_heads, {config.num_kv_heads}"
        )
    return config


def _check_sizes(raw: Mapping[str, Any]) -> None:
    for name in SIZES:
        if int(raw[name]) < 1:
            raise ValueError(f"{name} is {raw[name]}; it must be at least 1")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; the base model must be a Hugging Face directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} must contain a JSON object")
    return parsed


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = _family(raw)
    num_heads, num_layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
        vocab_size=int(raw["vocab_size"]),
        max_position=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw, family),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family == "smollm3")),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, num_layers),
        rotary_layers=_rotary_layers(raw, family, num_layers),
        eos_token_ids=_token_ids(raw.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    for family in FAMILIES:
        if raw.get("model_type") == family:
            break
    else:
        raise ModelError(f"model_type {raw.get('model_type')!r} is not supported; supported are {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise ModelError("quantization_config is set, but quantized weights are not supported; save the model in bf16")
    return family


def _rope(raw: Mapping[str, Any], family: Family) -> Rope:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA.get(family, 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported; it must be 1")
    match kind:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, "linear", float(scaling["factor"]))
        case "llama3":
            return Rope(
                theta,
                "llama3",
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    raise ModelError(f"rope_type {kind!r} is not supported; supported are default, linear and llama3")


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or family == "llama" or (family != "mistral" and not raw.get("use_sliding_window", False)):
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None and family == "smollm3":
        kinds = [
            "full_attention" if rotary else "sliding_attention" for rotary in _rotary_layers(raw, family, num_layers)
        ]
    if kinds is None:
        first = int(raw["max_window_layers"])
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rotary_layers(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * num_layers
    listed = raw.get("no_rope_layers")  # despite the name, 1 means that the layer uses RoPE
    if listed is not None:
        return tuple(bool(rotary) for rotary in listed)
    interval = int(raw.get("no_rope_layer_interval", 4))
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({int(value)})
