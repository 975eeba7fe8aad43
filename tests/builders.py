"""Small models and adapters on disk, created in milliseconds, offline and without torch.

The tokenizer is byte-level with a few merges, so every text round-trips; ids past its vocabulary are legal and decode
to an empty string.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[np.float32]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = ATTENTION + MLP

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("Ġ", "the"), ("e", "r"), ("o", "n"))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def tiny_llama(path: Path, *, seed: int = 0, dtype: str = "float32", **config: Any) -> Path:
    """Write a random tiny Llama as a Hugging Face directory: 3 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 320.

    `config` overrides fields of config.json, including `model_type` for another family of the same shape.
    """
    path.mkdir(parents=True, exist_ok=True)
    described = model_config(**config, dtype=dtype)
    (path / "config.json").write_text(json.dumps(described, indent=1))
    write_tokenizer(path)
    rng = np.random.default_rng(seed)
    write_safetensors(path / "model.safetensors", _random_weights(described, rng), dtype)
    return path


def model_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of `tiny_llama`."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    return config | overrides


def write_tokenizer(path: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json with a ChatML template; returns the directory."""
    tokens = list(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [left + right for left, right in MERGES]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return path


def lora_adapter(
    path: Path,
    model_dir: Path,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Collection[str] = ALL_LINEAR,
    layers: Collection[int] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    prefix: str = "base_model.model.",
    strength: float = 0.3,
    rank_pattern: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write a random PEFT LoRA directory for `model_dir`, strong enough to change its output.

    `rank_pattern` keys are module names such as `q_proj` or `layers.1.mlp.up_proj`; only the layers in `layers` get
    tensors; `targets` may include `embed_tokens` and `lm_head`. `config` overrides fields of adapter_config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    described = _adapter_config(model_dir, rank, alpha, targets, rank_pattern) | config
    (path / "adapter_config.json").write_text(json.dumps(described, indent=1))
    base = json.loads((model_dir / "config.json").read_text())
    ranks = {"": rank} | dict(rank_pattern or {})
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for module in target_modules(base, targets, layers):
        tensors |= _lora_pair(rng, prefix + module, *module_shape(base, module), _rank_of(module, ranks), strength)
    write_safetensors(path / "adapter_model.safetensors", tensors, dtype)
    return path


def target_modules(config: Mapping[str, Any], targets: Collection[str], layers: Collection[int] | None) -> list[str]:
    """Full names, such as `model.layers.0.self_attn.q_proj`, of the modules in `targets`."""
    chosen = range(config["num_hidden_layers"]) if layers is None else layers
    names = [f"model.layers.{i}.self_attn.{t}" for i in chosen for t in ATTENTION if t in targets]
    names += [f"model.layers.{i}.mlp.{t}" for i in chosen for t in MLP if t in targets]
    names += ["model.embed_tokens"] if "embed_tokens" in targets else []
    return names + (["lm_head"] if "lm_head" in targets else [])


def module_shape(config: Mapping[str, Any], module: str) -> tuple[int, int]:
    """(out features, in features) of a linear module; (vocabulary, hidden) of the embedding."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    return shapes[module.rsplit(".", 1)[-1]]


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: str | Mapping[str, str] = "float32") -> None:
    """Write fp32 arrays as `dtype`, one for all tensors or one per name: float32, float16 or bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, array in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype[name]
        start = len(data)
        data += _encode(array, kind)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[kind],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _encode(array: Array, dtype: str) -> bytes:
    exact = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "bfloat16":
        bits = exact.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    return exact.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def _random_weights(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Array]:
    hidden, head = config["hidden_size"], config["head_dim"]
    weights = {"model.embed_tokens.weight": _normal(rng, (config["vocab_size"], hidden), 0.25)}
    for module in target_modules(config, ALL_LINEAR, None):
        out, inputs = module_shape(config, module)
        weights[f"{module}.weight"] = _normal(rng, (out, inputs), inputs**-0.5)
        if _has_bias(config, module):
            weights[f"{module}.bias"] = _normal(rng, (out,), 0.2)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = _normal(rng, (hidden,), 0.1) + np.float32(1)
        if config["model_type"] == "qwen3":
            for norm in ("q_norm", "k_norm"):
                weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = _normal(rng, (head,), 0.1) + np.float32(1)
    weights["model.norm.weight"] = _normal(rng, (hidden,), 0.1) + np.float32(1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = _normal(rng, (config["vocab_size"], hidden), 0.25)
    return weights


def _has_bias(config: Mapping[str, Any], module: str) -> bool:
    name = module.rsplit(".", 1)[-1]
    if config["model_type"] == "qwen2" and name in ("q_proj", "k_proj", "v_proj"):
        return True
    return bool(config["attention_bias"] if name in ATTENTION else config["mlp_bias"])


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> Array:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _adapter_config(
    model_dir: Path, rank: int, alpha: float | None, targets: Collection[str], rank_pattern: Mapping[str, int] | None
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": {},
        "target_modules": sorted(targets),
    }


def _rank_of(module: str, ranks: Mapping[str, int]) -> int:
    matching = [rank for name, rank in ranks.items() if name and f".{module}".endswith(f".{name}")]
    return matching[0] if matching else ranks[""]


def _lora_pair(
    rng: np.random.Generator, name: str, out: int, inputs: int, rank: int, strength: float
) -> dict[str, Array]:
    if name.endswith("embed_tokens"):
        down = _normal(rng, (rank, out), rank**-0.5)
        up = _normal(rng, (inputs, rank), strength)
        return {f"{name}.lora_embedding_A": down, f"{name}.lora_embedding_B": up}
    down = _normal(rng, (rank, inputs), inputs**-0.5)
    up = _normal(rng, (out, rank), strength * rank**-0.5)
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
