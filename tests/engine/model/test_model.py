"""Base models: parsing config.json, rejected models, and the fingerprint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, ModelError, Request, SamplingParams, model_fingerprint, read_model_config
from tests.builders import tiny_llama


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def change_config(model: Path, **fields: Any) -> Path:
    path = model / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return model


def load(model: Path) -> Engine:
    return Engine(EngineConfig(model, dtype="float32", threads=1, pool_bytes=2**20))


def test_reads_both_spellings_of_rope(model_dir: Path) -> None:
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    old = read_model_config(change_config(model_dir, rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"}))
    new = {"rope_theta": 5e5, "rope_type": "llama3"} | scaling
    fields = {"rope_theta": "absent", "rope_scaling": "absent", "rope_parameters": new}
    assert read_model_config(change_config(model_dir, **fields)).rope == old.rope


def test_end_tokens_come_from_every_file(model_dir: Path) -> None:
    change_config(model_dir, eos_token_id=[5, 6])
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_model_config(model_dir).eos_token_ids == {5, 6, 7}
    assert load(model_dir)._eos_token_ids == {2, 5, 6, 7}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type 'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"hidden_size": "absent"}, r"config\.json has no field 'hidden_size'"),
        ({"hidden_size": "wide"}, r"config\.json has an invalid value: invalid literal"),
        (
            {"num_attention_heads": 0},
            r"config\.json has an invalid value: num_attention_heads is 0; it must be at least 1",
        ),
        (
            {"num_key_value_heads": 3},
            r"config\.json: num_attention_heads, 4, must be a multiple of num_key_value_heads, 3",
        ),
        ({"head_dim": 15}, r"config\.json: head_dim is 15; it must be even"),
    ],
)
def test_errors_name_the_unsupported_field(model_dir: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_model_config(change_config(model_dir, **fields))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, r"config\.json does not exist"),
        ("config.json", b"{", r"config\.json cannot be read as JSON"),
        ("config.json", b"[" * 50_000, r"config\.json cannot be read as JSON"),
        ("config.json", b"[]", r"config\.json must contain a JSON object"),
        ("tokenizer.json", None, r"tokenizer\.json does not exist"),
        ("model.safetensors", None, r"contains neither model\.safetensors nor model\.safetensors\.index\.json"),
        ("model.safetensors", b"short", r"model\.safetensors is truncated or not a safetensors file"),
    ],
)
def test_errors_name_the_broken_file(model_dir: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is None:
        (model_dir / name).unlink()
    else:
        (model_dir / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        load(model_dir)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": 4}, r"tensor model\.layers\.3\.input_layernorm\.weight is missing"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.2\..* is not part of this decoder"),
        ({"tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
        ({"vocab_size": 321}, r"tensor model\.embed_tokens\.weight has shape \(320, 64\), but .* requires \(321, 64\)"),
    ],
)
def test_errors_name_the_tensor_that_does_not_fit(model_dir: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load(change_config(model_dir, **fields))


def test_sharded_weights_give_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(sharded, max_shard_size="200KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, sharded)
    assert (sharded / "model.safetensors.index.json").exists()
    request = Request(prompt="the thing", sampling=SamplingParams(max_tokens=20))
    assert load(sharded).generate([request])[0].token_ids == load(model_dir).generate([request])[0].token_ids
    assert model_fingerprint(sharded) != model_fingerprint(model_dir)
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002.* does not exist"):
        load(sharded)
    with pytest.raises(ModelError, match=r"model-00002.* does not exist"):
        model_fingerprint(sharded)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_fingerprint_covers_every_file(model_dir: Path, name: str) -> None:
    before = model_fingerprint(model_dir)
    assert model_fingerprint(model_dir) == before
    path = model_dir / name
    path.write_bytes(path.read_bytes() + b" ")
    assert model_fingerprint(model_dir) != before
    path.unlink()
    with pytest.raises(ModelError):
        model_fingerprint(model_dir)


def test_checking_needs_no_torch() -> None:
    """The registrar and client tools import the package to check adapters; importing torch would cost half a second."""
    program = (
        "import sys, engine; engine.check_adapter; assert 'torch' not in sys.modules;"
        "engine.Engine; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
