"""Reads base weights from safetensors and packs them for the kernels; projections of one input are fused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.files.digest import weight_files
from engine.files.model_config import ModelConfig
from engine.files.tensorfile import StoredTensor, TensorFileError, read_tensor_file
from engine.kernels import Kernels, PackedLinear
from engine.lora.layout import to_tensor

Stored = StoredTensor | torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` and `gate_up` concatenate their projections' outputs in this order."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of the decoder; `head` is the embedding if they are tied."""

    embedding: PackedLinear
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: PackedLinear


def load_weights(
    stored: Mapping[str, Stored], config: ModelConfig, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> ModelWeights:
    """Pack the stored tensors on a device; the packed weights are the only copy that stays in memory.

    Raises ModelError naming a tensor that is missing, unknown or of the wrong shape.
    """
    reader = _Reader(stored, dtype, kernels, device)
    hidden = config.hidden_size
    embedding = reader.packed("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = tuple(_layer(reader, config, index) for index in range(config.num_layers))
    norm = reader.vector("model.norm.weight", hidden)
    tied = config.tie_word_embeddings
    head = embedding if tied else reader.packed("lm_head.weight", config.vocab_size, hidden)
    reader.check_all_used({"lm_head.weight"} if tied else set())
    return ModelWeights(embedding, layers, norm, head)


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """The tensors of the base model's weight files; raises ModelError if a file is damaged or missing."""
    stored: dict[str, StoredTensor] = {}
    for name in weight_files(model_dir):
        try:
            stored |= read_tensor_file(model_dir / name)
        except TensorFileError as error:
            raise ModelError(str(error)) from error
        except FileNotFoundError as error:
            raise ModelError(f"{model_dir / name} is listed in the weights index but does not exist") from error
    return stored


class _Reader:
    """Reads tensors by name and tracks which ones were used."""

    def __init__(
        self, stored: Mapping[str, Stored], dtype: torch.dtype, kernels: Kernels, device: torch.device
    ) -> None:
        self._stored, self._dtype, self._kernels, self._device = stored, dtype, kernels, device
        self._used: set[str] = set()

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in the engine's dtype; it is still mapped from its file if no conversion was needed."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"tensor {name} is missing from the base model's weights")
        if tuple(stored.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(stored.shape)}, but config.json requires {shape}")
        self._used.add(name)
        if isinstance(stored, torch.Tensor):
            return stored.to(self._device, self._dtype)
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name} has dtype {stored.dtype}; supported are F32, F16 and BF16")
        return to_tensor(stored).to(self._device, self._dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A vector, such as the weight of a norm."""
        return self._read(name, size).clone()

    def packed(self, name: str, outputs: int, inputs: int) -> PackedLinear:
        """A single packed matrix."""
        return self._kernels.pack_linear([self._read(name, outputs, inputs)])

    def linear(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], inputs: int, *, bias: bool
    ) -> PackedLinear:
        """Projections of one input, packed together."""
        pairs = list(zip(names, sizes, strict=True))
        weights = [self._read(f"{prefix}.{name}.weight", size, inputs) for name, size in pairs]
        biases = [self._read(f"{prefix}.{name}.bias", size) for name, size in pairs] if bias else []
        return self._kernels.pack_linear(weights, biases)

    def check_all_used(self, ignored: set[str]) -> None:
        """Raise ModelError if there is a tensor that the decoder does not use."""
        unknown = [name for name in self._stored if name not in self._used | ignored and "rotary_emb" not in name]
        if unknown:
            raise ModelError(f"tensor {unknown[0]} is not part of this decoder; the model's architecture differs")


def _layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(attention, ("q_proj", "k_proj", "v_proj"), qkv_sizes, hidden, bias=config.qkv_bias),
        q_norm=reader.vector(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=reader.vector(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=reader.linear(attention, ("o_proj",), (hidden,), config.q_size, bias=config.o_bias),
        post_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(mlp, ("gate_proj", "up_proj"), (inner, inner), hidden, bias=config.mlp_bias),
        down=reader.linear(mlp, ("down_proj",), (hidden,), inner, bias=config.mlp_bias),
    )
