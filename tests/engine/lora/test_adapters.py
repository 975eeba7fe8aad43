"""Checking PEFT directories: each defect has an error message that names its cause."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import AdapterError, adapter_digest, check_adapter
from engine.files.model_config import read_model_config
from engine.lora.peft import read_adapter
from tests.builders import ALL_LINEAR, Array, lora_adapter, tiny_llama, write_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"
UP1 = "base_model.model.model.layers.1.mlp.up_proj"

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter_dir(tmp_path: Path, model_dir: Path) -> Path:
    return lora_adapter(tmp_path / "adapter", model_dir, rank=4)


def configured(**fields: Any) -> Change:
    def change(adapter: Path) -> None:
        path = adapter / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors_of(adapter: Path) -> dict[str, Array]:
    raw = (adapter / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__")
    data = raw[8 + size :]
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for name, entry in header.items()
    }


def with_tensors(edit: Callable[[dict[str, Array]], object]) -> Change:
    def change(adapter: Path) -> None:
        tensors = tensors_of(adapter)
        edit(tensors)
        write_safetensors(adapter / WEIGHTS, tensors)

    return change


def renamed(old: str, new: str) -> Change:
    def edit(tensors: dict[str, Array]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return with_tensors(edit)


def valued(name: str, value: float) -> Change:
    def edit(tensors: dict[str, Array]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][1, 2] = value

    return with_tensors(edit)


def pickled(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")


def pickle_in_disguise(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(pickle.dumps({"a": 1}))


def truncated(adapter: Path) -> None:
    raw = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def crowded(adapter: Path) -> None:
    entry = {"dtype": "F32", "shape": [0, 64], "data_offsets": [0, 0]}
    header = json.dumps({f"layers.0.self_attn.q_proj.lora_A.n{n}.weight": entry for n in range(20_000)}).encode()
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def integer_tensor(adapter: Path) -> None:
    raw = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(raw.replace(b'"F32"', b'"I32"', 1))


BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (lambda d: (d / CONFIG).unlink(), r"adapter_config\.json does not exist"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), r"adapter_model\.safetensors does not exist"),
    "config is not JSON": (lambda d: (d / CONFIG).write_text("{r: 8"), r"adapter_config\.json is not JSON"),
    "config is deeply nested": (lambda d: (d / CONFIG).write_text("[" * 50_000), r"adapter_config\.json is not JSON"),
    "config is a list": (lambda d: (d / CONFIG).write_text("[]"), r"adapter_config\.json must contain a JSON object"),
    "config is huge": (lambda d: (d / CONFIG).write_text(" " * 1024**2 + "{}"), r"adapter_config\.json is \d+ bytes"),
    "pickle": (pickled, r"adapter_model\.bin is a pickle.*save it as adapter_model\.safetensors"),
    "pickle in disguise": (pickle_in_disguise, r"adapter_model\.safetensors is a pickle"),
    "truncated": (truncated, r"adapter_model\.safetensors is truncated or not a safetensors file"),
    "more tensors than modules": (crowded, r"adapter_model\.safetensors has a header of \d+ bytes, but at most"),
    "empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), r"adapter_model\.safetensors is truncated"),
    "not LoRA": (configured(peft_type="IA3"), "peft_type is 'IA3'; only 'LORA'"),
    "DoRA": (configured(use_dora=True), "use_dora is set: DoRA is not supported"),
    "bias": (configured(bias="lora_only"), "bias is 'lora_only'"),
    "B's bias": (configured(lora_bias=True), "lora_bias is set"),
    "modules to save": (configured(modules_to_save=["lm_head"]), "modules_to_save is set"),
    "layer replication": (configured(layer_replication=[[0, 2]]), "layer_replication is set"),
    "trained tokens": (configured(trainable_token_indices=[3]), "trainable_token_indices is set"),
    "unknown variant": (
        configured(use_quantum=True),
        "use_quantum is set: this variant of LoRA is not supported",
    ),
    "changed base": (configured(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes the base"),
    "rank 0": (configured(r=0), "r is 0; a rank must be a whole number from 1 to 512"),
    "rank as text": (configured(r="8"), "r is '8'"),
    "alpha as text": (configured(lora_alpha="16"), "lora_alpha is '16'; it must be a number from"),
    "alpha too large for a float": (configured(lora_alpha=10**400), "lora_alpha is 1000"),
    "alpha that makes weights infinite": (configured(lora_alpha=1e308), r"lora_alpha is 1e\+308"),
    "alpha is NaN": (configured(lora_alpha=float("nan")), "lora_alpha is nan"),
    "rank pattern": (configured(rank_pattern={"q_proj": -1}), r"rank_pattern\['q_proj'\] is -1"),
    "rank pattern as list": (configured(rank_pattern=["q_proj"]), "rank_pattern is .* must be an object"),
    "invalid expression": (configured(target_modules="q_proj("), "target_modules: 'q_proj\\('"),
    "target modules": (configured(target_modules=7), "target_modules is 7; it must be a list"),
    "layers": (configured(layers_to_transform="all"), "layers_to_transform is 'all'"),
    "base model": (configured(base_model_name_or_path=3), "base_model_name_or_path is 3; it must be a string"),
    "config disagrees with ranks": (configured(r=8), "tensor .* has rank 4, but adapter_config.json gives it rank 8"),
    "rank of one module": (
        configured(rank_pattern={"layers.1.mlp.up_proj": 2}),
        "tensor .*layers.1.mlp.up_proj.lora_A.weight has rank 4, but .* gives it rank 2",
    ),
    "ranks of A and B": (
        with_tensors(lambda t: t.update({f"{Q0}.lora_B.weight": np.zeros((64, 3), np.float32)})),
        "q_proj.lora_B.weight has rank 3, but adapter_config.json gives it rank 4",
    ),
    "A without B": (
        with_tensors(lambda t: t.pop(f"{UP1}.lora_B.weight")),
        "up_proj.lora_A.weight has no matching lora_B",
    ),
    "B without A": (
        with_tensors(lambda t: t.pop(f"{UP1}.lora_A.weight")),
        "up_proj.lora_B.weight has no matching lora_A",
    ),
    "wrong base": (
        with_tensors(lambda t: t.update({f"{Q0}.lora_A.weight": np.zeros((4, 80), np.float32)})),
        r"q_proj.lora_A.weight has shape \(4, 80\), but q_proj of this base model has 64 inputs",
    ),
    "wrong base's outputs": (
        with_tensors(lambda t: t.update({f"{Q0}.lora_B.weight": np.zeros((80, 4), np.float32)})),
        r"q_proj.lora_B.weight has shape \(80, 4\), but q_proj of this base model has 64 outputs",
    ),
    "unknown projection": (renamed("layers.0.self_attn.q_proj", "layers.0.self_attn.W_pack"), "no projection W_pack"),
    "unknown layer": (renamed("layers.2.", "layers.7."), "there is no layer 7; the model has 3"),
    "another architecture": (renamed("model.layers", "transformer.h"), "tensor .*transformer.h.* matches no module"),
    "another kind of tensor": (renamed("lora_A.weight", "hada_w1"), "hada_w1 is neither lora_A nor lora_B"),
    "the base's embeddings": (
        with_tensors(lambda t: t.update({EMBEDDING: np.zeros((320, 64), np.float32)})),
        "embed_tokens.base_layer.weight is a full weight of the base model.* save_embedding_layers=False",
    ),
    "very long name": (renamed(Q0, "a." * 5000), "is neither lora_A nor lora_B"),
    "not targeted": (
        configured(target_modules=["q_proj"]),
        "tensor .* module that adapter_config.json does not target",
    ),
    "excluded": (
        configured(exclude_modules=["up_proj"]),
        "up_proj.lora_A.weight belongs to a module that adapter_config",
    ),
    "layer not targeted": (configured(layers_to_transform=[0]), r"layers.1.* belongs to a module that adapter_config"),
    "duplicate": (
        with_tensors(
            lambda t: t.update({Q0.removeprefix("base_model.model.") + ".lora_A.weight": t[f"{Q0}.lora_A.weight"]})
        ),
        "are the same matrix",
    ),
    "no tensors": (with_tensors(lambda t: t.clear()), "contains no tensors"),
    "NaN": (valued(f"{UP1}.lora_B.weight", np.nan), "up_proj.lora_B.weight contains NaN or infinite values"),
    "infinity": (valued(f"{UP1}.lora_A.weight", -np.inf), "up_proj.lora_A.weight contains NaN or infinite values"),
    "integers": (integer_tensor, "has dtype I32; supported are F32, F16, BF16"),
    "three dimensions": (
        with_tensors(lambda t: t.update({f"{Q0}.lora_A.weight": np.zeros((4, 8, 8), np.float32)})),
        r"q_proj.lora_A.weight has shape \(4, 8, 8\); a LoRA matrix has two dimensions",
    ),
    "embedding's tensors on a projection": (
        renamed("q_proj.lora_A.weight", "q_proj.lora_embedding_A"),
        "q_proj.lora_embedding_A does not fit its module, which is not an embedding",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), BROKEN.values(), ids=BROKEN)
def test_errors_name_the_defect(adapter_dir: Path, model_dir: Path, change: Change, sentence: str) -> None:
    assert check_adapter(adapter_dir, model_dir).rank == 4
    change(adapter_dir)
    with pytest.raises(AdapterError, match=sentence):
        check_adapter(adapter_dir, model_dir)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_finds_nan_in_every_type(adapter_dir: Path, model_dir: Path, dtype: str) -> None:
    tensors = tensors_of(adapter_dir)
    write_safetensors(adapter_dir / WEIGHTS, tensors, dtype)
    check_adapter(adapter_dir, model_dir)
    tensors[f"{Q0}.lora_A.weight"] = np.full((4, 64), np.inf, np.float32)
    write_safetensors(adapter_dir / WEIGHTS, tensors, dtype)
    with pytest.raises(AdapterError, match="contains NaN or infinite"):
        check_adapter(adapter_dir, model_dir)


@pytest.mark.parametrize("first_bytes", [b"PK", b"\x80\x3a"])
def test_a_header_length_that_looks_like_a_pickle_is_accepted(
    adapter_dir: Path, model_dir: Path, first_bytes: bytes
) -> None:
    path = adapter_dir / WEIGHTS
    raw = path.read_bytes()
    size, length = int.from_bytes(raw[:8], "little"), int.from_bytes(first_bytes, "little")
    path.write_bytes(length.to_bytes(8, "little") + raw[8 : 8 + size].ljust(length) + raw[8 + size :])
    assert path.read_bytes()[:2] == first_bytes
    assert check_adapter(adapter_dir, model_dir).rank == 4


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path, model_dir: Path) -> None:
    other = tiny_llama(tmp_path / "other", hidden_size=32)
    with pytest.raises(AdapterError, match="trained for another base model"):
        check_adapter(lora_adapter(tmp_path / "adapter", other), model_dir)


def test_describes_the_adapter(tmp_path: Path, model_dir: Path) -> None:
    adapter = lora_adapter(
        tmp_path / "adapter",
        model_dir,
        rank=8,
        targets=("q_proj", "v_proj", "lm_head"),
        rank_pattern={"v_proj": 12},
        layers=[1],
        dtype="bfloat16",
    )
    info = check_adapter(adapter, model_dir)
    assert info.name == "adapter"
    assert info.digest == adapter_digest(adapter)
    assert info.rank == 12
    assert info.target_modules == ("lm_head", "q_proj", "v_proj")
    assert info.num_bytes == 2 * (8 * (64 + 64) + 12 * (64 + 32) + 8 * (64 + 320))
    assert info.base_model == str(model_dir)


ACCEPTED: dict[str, Change] = {
    "without PEFT's prefix": renamed("base_model.model.", ""),
    "without any prefix": renamed("base_model.model.model.", ""),
    "trained on the bare decoder": renamed("base_model.model.model.", "base_model.model."),
    "with the adapter's name": renamed(".lora_A.weight", ".lora_A.default.weight"),
    "targets as an expression": configured(target_modules=r".*\.(self_attn|mlp)\.\w+_proj"),
    "targets as full names": configured(
        target_modules=[f"model.layers.{i}.{b}.{t}" for i in range(3) for b in ("self_attn", "mlp") for t in ALL_LINEAR]
    ),
    "all linear": configured(target_modules="all-linear"),
    "no targets": configured(target_modules=None),
    "targets that have no tensors": configured(target_modules=[*ALL_LINEAR, "lm_head", "something_else"]),
    "all layers by number": configured(layers_to_transform=[0, 1, 2]),
    "harmless initialisation": configured(init_lora_weights="gaussian"),
    "rank pattern that matches no module": configured(rank_pattern={"other": 3}),
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_accepts_every_spelling(adapter_dir: Path, model_dir: Path, change: Change) -> None:
    change(adapter_dir)
    assert check_adapter(adapter_dir, model_dir).target_modules == tuple(sorted(ALL_LINEAR))


def test_scale_follows_the_patterns(tmp_path: Path, model_dir: Path) -> None:
    def scales(**config: Any) -> dict[str, float]:
        adapter = lora_adapter(tmp_path / "adapter", model_dir, rank=4, alpha=6, rank_pattern={"q_proj": 9}, **config)
        modules = read_adapter(adapter, read_model_config(model_dir)).modules
        return {f"{m.module.layer}.{m.module.projection}": m.scale for m in modules}

    plain = scales(alpha_pattern={r"layers\.1\.mlp\..*": 20})
    assert (plain["0.k_proj"], plain["0.q_proj"], plain["1.up_proj"], plain["0.up_proj"]) == (1.5, 6 / 9, 5, 1.5)
    stabilised = scales(use_rslora=True, alpha_pattern={"model.layers.2.self_attn.q_proj": 12})
    assert (stabilised["0.k_proj"], stabilised["0.q_proj"], stabilised["2.q_proj"]) == (3, 2, 4)


def test_the_digest_covers_the_boundary_between_files(adapter_dir: Path) -> None:
    digest = adapter_digest(adapter_dir)
    assert digest == adapter_digest(adapter_dir)
    config = adapter_dir / CONFIG
    moved = config.read_bytes()
    config.write_bytes(moved[:-1])
    (adapter_dir / WEIGHTS).write_bytes(moved[-1:] + (adapter_dir / WEIGHTS).read_bytes())
    assert adapter_digest(adapter_dir) != digest
