"""An adapter's matrices in memory, fused the way the base projections are."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.lora.peft import LoraModule, PeftAdapter
from engine.model.config import EMBEDDING, LM_HEAD, ModelConfig
from engine.tensorfile import StoredTensor
from engine.types import AdapterInfo

# Projections that share an input are one product; the order is the order of their columns in the fused output.
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Expand:
    """y[:, columns] += scale · h[:, ranks] @ up.T with `up` (columns, ranks)."""

    ranks: slice
    columns: slice
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class FusedLora:
    """h = x @ down.T with `down` (sum of ranks, in features), then one expansion per adapted projection."""

    down: torch.Tensor
    expands: tuple[Expand, ...]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A loaded adapter: `layers[i]` maps names of `FUSED` to what is adapted there; absent means zero.

    `embedding.down` is (vocabulary, rank), one row per token.
    """

    info: AdapterInfo
    layers: tuple[Mapping[str, FusedLora], ...]
    embedding: FusedLora | None
    head: FusedLora | None


def load_adapter(adapter: PeftAdapter, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """Read a checked adapter's matrices once, converted to the engine's type."""
    by_place = {(module.module.layer, module.module.projection): module for module in adapter.modules}
    loader = _Loader(dtype, device)
    layers = tuple(
        {
            name: fused
            for name, projections in FUSED.items()
            if (fused := loader.fused([(model.width(p), by_place.get((layer, p))) for p in projections])) is not None
        }
        for layer in range(model.num_layers)
    )
    embedding = loader.embedding(by_place.get((None, EMBEDDING)))
    head = loader.fused([(model.vocab_size, by_place.get((None, LM_HEAD)))])
    return AdapterWeights(_held_info(adapter, dtype), layers, embedding, head)


def to_tensor(stored: StoredTensor) -> torch.Tensor:
    """The stored values without a copy, mapped from the file."""
    bits = stored.bits()
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(TORCH_DTYPES[stored.dtype])


@dataclass(frozen=True, slots=True)
class _Loader:
    dtype: torch.dtype
    device: torch.device

    def fused(self, places: Iterable[tuple[int, LoraModule | None]]) -> FusedLora | None:
        """Fuse the adapted ones of neighbouring projections, each given with its width."""
        downs: list[torch.Tensor] = []
        expands: list[Expand] = []
        column = rank = 0
        for width, module in places:
            if module is not None:
                downs.append(to_tensor(module.down).to(self.dtype))
                ranks, columns = slice(rank, rank + module.rank), slice(column, column + width)
                expands.append(Expand(ranks, columns, self._copy(to_tensor(module.up)), module.scale))
                rank += module.rank
            column += width
        return FusedLora(torch.cat(downs).to(self.device), tuple(expands)) if expands else None

    def embedding(self, module: LoraModule | None) -> FusedLora | None:
        if module is None:
            return None
        up = self._copy(to_tensor(module.up))
        expand = Expand(slice(0, module.rank), slice(0, up.shape[0]), up, module.scale)
        return FusedLora(self._copy(to_tensor(module.down).T), (expand,))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype, copy=True, memory_format=torch.contiguous_format)


def _held_info(adapter: PeftAdapter, dtype: torch.dtype) -> AdapterInfo:
    elements = sum(math.prod(module.down.shape) + math.prod(module.up.shape) for module in adapter.modules)
    info = adapter.info
    num_bytes = elements * dtype.itemsize
    return AdapterInfo(info.name, info.digest, info.rank, info.target_modules, num_bytes, info.base_model)
