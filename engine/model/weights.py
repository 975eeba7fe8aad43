"""Base weights read from safetensors, packed once for the kernels; projections that share an input are one matrix."""

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
    """One decoder layer. `qkv` and `gate_up` stack their projections' outputs in this order."""

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
    """The whole decoder; `head` is the embedding itself when they are tied."""

    embedding: PackedLinear
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: PackedLinear


def load_weights(
    stored: Mapping[str, Stored], config: ModelConfig, dtype: torch.dtype, kernels: Kernels, where: torch.device
) -> ModelWeights:
    """Pack every weight once on the device, keeping nothing else of it; `stored_tensors` are those of a directory.

    Raises ModelError naming a tensor that is missing, unknown or of the wrong shape.
    """
    reader = _Reader(stored, dtype, kernels, where)
    hidden = config.hidden_size
    embedding = reader.packed("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = tuple(_layer(reader, config, index) for index in range(config.num_layers))
    norm = reader.vector("model.norm.weight", hidden)
    tied = config.tie_word_embeddings
    head = embedding if tied else reader.packed("lm_head.weight", config.vocab_size, hidden)
    reader.check_all_taken({"lm_head.weight"} if tied else set())
    return ModelWeights(embedding, layers, norm, head)


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """The base model's tensors in its files; raises ModelError when one of them is damaged or missing."""
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

    def __init__(self, stored: Mapping[str, Stored], dtype: torch.dtype, kernels: Kernels, where: torch.device) -> None:
        self._stored, self._dtype, self._kernels, self._where = stored, dtype, kernels, where
        self._taken: set[str] = set()

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in the engine's type; of that same type it is still mapped from its file."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"tensor {name} is missing from the base model's weights")
        if tuple(stored.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(stored.shape)}, but config.json makes it {shape}")
        self._taken.add(name)
        if isinstance(stored, torch.Tensor):
            return stored.to(self._where, self._dtype)
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name} is of type {stored.dtype}; supported are F32, F16 and BF16")
        return to_tensor(stored).to(self._where, self._dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight."""
        return self._take(name, size).clone()

    def packed(self, name: str, outputs: int, inputs: int) -> PackedLinear:
        """A matrix of its own."""
        return self._kernels.pack_linear([self._take(name, outputs, inputs)])

    def linear(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], inputs: int, *, bias: bool
    ) -> PackedLinear:
        """Projections of one input."""
        pairs = list(zip(names, sizes, strict=True))
        weights = [self._take(f"{prefix}.{name}.weight", size, inputs) for name, size in pairs]
        biases = [self._take(f"{prefix}.{name}.bias", size) for name, size in pairs] if bias else []
        return self._kernels.pack_linear(weights, biases)

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
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(attention, ("q_proj", "k_proj", "v_proj"), qkv_sizes, hidden, bias=config.qkv_bias),
        q_norm=reader.vector(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=reader.vector(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=reader.linear(attention, ("o_proj",), (hidden,), config.q_size, bias=config.o_bias),
        post_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(mlp, ("gate_proj", "up_proj"), (inner, inner), hidden, bias=config.mlp_bias),
        down=reader.linear(mlp, ("down_proj",), (hidden,), inner, bias=config.mlp_bias),
    )
