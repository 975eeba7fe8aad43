"""Base weights read from safetensors, projections that share an input fused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.digest import weight_files
from engine.errors import ModelError
from engine.lora.weights import to_tensor
from engine.model.config import ModelConfig
from engine.tensorfile import StoredTensor, TensorFileError, read_tensor_file


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b with `weight` (out, in)."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` and `gate_up` stack their projections' outputs in this order."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole decoder; `head` is the embedding itself when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read every weight once; raises ModelError naming a tensor that is missing, unknown or of the wrong shape."""
    reader = _Reader(_stored_tensors(model_dir), dtype, device)
    hidden = config.hidden_size
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = tuple(_layer(reader, config, index) for index in range(config.num_layers))
    norm = reader.take("model.norm.weight", hidden)
    tied = config.tie_word_embeddings
    head = embedding if tied else reader.take("lm_head.weight", config.vocab_size, hidden)
    reader.check_all_taken({"lm_head.weight"} if tied else set())
    return ModelWeights(embedding, layers, norm, head)


def _stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for name in weight_files(model_dir):
        try:
            stored |= read_tensor_file(model_dir / name)
        except TensorFileError as error:
            raise ModelError(str(error)) from error
        except FileNotFoundError as error:
            raise ModelError(f"{model_dir / name} is named by the index but does not exist") from error
    return stored


class _Reader:
    """Hands out tensors by name and knows which were never asked for."""

    def __init__(self, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device) -> None:
        self._stored, self._dtype, self._device = stored, dtype, device
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in the engine's type; of that same type on the CPU it stays mapped from its file."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"tensor {name} is missing from the base model's weights")
        if stored.shape != shape:
            raise ModelError(f"tensor {name} has shape {stored.shape}, but config.json makes it {shape}")
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name} is of type {stored.dtype}; supported are F32, F16 and BF16")
        self._taken.add(name)
        return to_tensor(stored).to(self._device, self._dtype)

    def linear(self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], inputs: int, *, bias: bool) -> Linear:
        """Fuse projections of one input."""
        pairs = list(zip(names, sizes, strict=True))
        weights = [self.take(f"{prefix}.{name}.weight", size, inputs) for name, size in pairs]
        biases = [self.take(f"{prefix}.{name}.bias", size) for name, size in pairs] if bias else []
        return Linear(torch.cat(weights), torch.cat(biases) if bias else None)

    def check_all_taken(self, ignored: set[str]) -> None:
        """Raise ModelError when the file holds a tensor that the decoder does not use."""
        unknown = [name for name in self._stored if name not in self._taken | ignored and "rotary_emb" not in name]
        if unknown:
            raise ModelError(f"tensor {unknown[0]} belongs to no part of this decoder; the model is of another kind")


def _layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
    return LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(attention, ("q_proj", "k_proj", "v_proj"), qkv_sizes, hidden, bias=config.qkv_bias),
        q_norm=reader.take(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=reader.take(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=reader.linear(attention, ("o_proj",), (hidden,), config.q_size, bias=config.o_bias),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(mlp, ("gate_proj", "up_proj"), (inner, inner), hidden, bias=config.mlp_bias),
        down=reader.linear(mlp, ("down_proj",), (hidden,), inner, bias=config.mlp_bias),
    )
