"""A random base model in memory, built by transformers so that PEFT can use it too, and random adapters on disk."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from engine.kernels.triton.measure.shapes import ModelShape

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.01
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class RandomModel:
    """`peer`: transformers' model on the device; `weights`: its tensors by name; `directory`: config and tokenizer."""

    directory: Path
    shape: ModelShape
    peer: Any

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The base weights for the engine."""
        tensors: Mapping[str, Tensor] = self.peer.state_dict()
        return tensors


def random_model(
    directory: Path, shape: ModelShape, dtype: torch.dtype, where: torch.device, context: int
) -> RandomModel:
    """Create a random Llama of a shape, with positions up to `context`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with where, default_dtype(dtype):
        peer: Any = LlamaForCausalLM(config)
    peer = peer.eval().requires_grad_(False)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    _write_tokenizer(directory)
    return RandomModel(directory, shape, peer)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in this dtype directly: 8 billion weights first in float32 would take another 32 GB."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a single token: prompts are given as ids."""
    Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def random_adapter(directory: Path, shape: ModelShape, rank: int, dtype: torch.dtype, where: torch.device) -> Path:
    """Write a PEFT directory that adapts all seven projections."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)
    sizes = [(k, n) for k, outputs, _ in shape.groups.values() for n in outputs]
    tensors: dict[str, Tensor] = {}
    for layer in range(shape.num_layers):
        for target, (k, n) in zip(TARGETS, sizes, strict=True):
            block = "mlp" if target in TARGETS[4:] else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            for part, size in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
                values = torch.randn(*size, device=where) * STRENGTH
                tensors[f"{name}.{part}.weight"] = values.to(dtype).cpu()
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "base_model_name_or_path": "random",
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory
