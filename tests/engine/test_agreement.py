"""Log-probabilities agree with transformers + PEFT, and with manually merged weights, to 1e-4 in fp32."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Output, Request, SamplingParams
from tests.builders import ALL_LINEAR, lora_adapter, tiny_llama
from tests.engine.oracles import MergedOracle, Oracle, differences

TOLERANCE = 1e-4

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank-1": {"rank": 1},
    "rank-4": {"rank": 4, "targets": ("q_proj", "v_proj")},
    "rank-8": {"rank": 8, "dtype": "bfloat16"},
    "rank-33": {"rank": 33, "alpha": 16},
    "rank-64": {"rank": 64, "alpha": 24, "dtype": "float16"},
    "rslora": {"rank": 16, "alpha": 6, "use_rslora": True},
    "patterns": {
        "rank": 8,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"k_proj": 40, r"layers\.2\.mlp\..*": 4},
    },
    "some-layers": {"rank": 8, "layers": [0, 2], "targets": ("o_proj", "gate_proj", "down_proj")},
    "embeddings": {"rank": 4, "targets": (*ALL_LINEAR, "embed_tokens", "lm_head")},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: lora_adapter(root / name, model_dir, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def engine(model_dir: Path, adapters: dict[str, Path]) -> Engine:
    engine = Engine(EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=4, max_batch_tokens=64))
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    return engine


@pytest.fixture(scope="module")
def oracles(model_dir: Path, adapters: dict[str, Path]) -> dict[str | None, Oracle]:
    return {None: Oracle(model_dir)} | {name: Oracle(model_dir, adapter) for name, adapter in adapters.items()}


def requests_for(names: list[str | None], per_name: int = 1, max_tokens: int = 12) -> list[Request]:
    rng = random.Random(7)
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=20, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=[rng.randrange(3, 266) for _ in range(rng.choice([1, 3, 7, 40]))],
            adapter=name,
            sampling=sampling,
        )
        for _ in range(per_name)
        for name in names
    ]


def check(requests: list[Request], outputs: list[Output], oracles: dict[str | None, Oracle]) -> None:
    for request, output in zip(requests, outputs, strict=True):
        assert max(differences(oracles[request.adapter], request, output)) < TOLERANCE, request.adapter


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_each_adapter_alone(engine: Engine, oracles: dict[str | None, Oracle], name: str | None) -> None:
    requests = requests_for([name], per_name=3)
    check(requests, engine.generate(requests), oracles)


def test_all_mixed_in_one_batch_with_base_rows(engine: Engine, oracles: dict[str | None, Oracle]) -> None:
    requests = requests_for([None, *ADAPTERS], per_name=3)
    check(requests, engine.generate(requests), oracles)


def test_adapters_differ_from_the_base_and_from_each_other(engine: Engine, oracles: dict[str | None, Oracle]) -> None:
    """Otherwise the agreement would prove nothing."""
    requests = requests_for(list(ADAPTERS))
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        wrong = [oracle for name, oracle in oracles.items() if name != request.adapter]
        assert min(max(differences(oracle, request, output)) for oracle in wrong) > 100 * TOLERANCE


def patterned_scale(module: str, rank: int) -> float:
    """The scales of the `patterns` configuration, computed independently."""
    alpha = 40 if module.endswith("k_proj") else 4 if module.startswith("model.layers.2.mlp") else 16
    return alpha / rank


SCALES: dict[str, Callable[[str, int], float]] = {
    "rank-1": lambda module, rank: 2.0,
    "rank-4": lambda module, rank: 2.0,
    "rank-8": lambda module, rank: 2.0,
    "rank-33": lambda module, rank: 16 / 33,
    "rank-64": lambda module, rank: 24 / 64,
    "rslora": lambda module, rank: 6 / 4,
    "patterns": patterned_scale,
    "some-layers": lambda module, rank: 2.0,
}


def test_one_batch_of_all_agrees_with_merged_weights(
    engine: Engine, model_dir: Path, adapters: dict[str, Path]
) -> None:
    merged = {name: MergedOracle(model_dir, adapters[name], scale) for name, scale in SCALES.items()}
    requests = requests_for([None, *SCALES], per_name=2)
    outputs = engine.generate(requests)
    check(requests, outputs, {None: Oracle(model_dir)} | merged)
    base = [request for request in requests if request.adapter is None]
    alone = Engine(EngineConfig(model_dir, dtype="float32", threads=1)).generate(base)
    mixed = [output for output, request in zip(outputs, requests, strict=True) if request.adapter is None]
    assert [o.logprobs for o in mixed] == [o.logprobs for o in alone]


def test_greedy_tokens_are_the_same_alone_and_in_any_mix(engine: Engine) -> None:
    requests = requests_for([None, *ADAPTERS], per_name=2, max_tokens=24)
    alone = [engine.generate([request])[0].token_ids for request in requests]
    assert [output.token_ids for output in engine.generate(requests)] == alone
    shuffled = list(enumerate(requests))
    random.Random(1).shuffle(shuffled)
    for start in range(0, len(shuffled), 5):
        part = shuffled[start : start + 5]
        outputs = engine.generate([request for _, request in part])
        assert [output.token_ids for output in outputs] == [alone[index] for index, _ in part]


def test_bfloat16_stays_close(model_dir: Path, adapters: dict[str, Path], oracles: dict[str | None, Oracle]) -> None:
    engine = Engine(EngineConfig(model_dir, dtype="bfloat16", threads=1))
    names: list[str | None] = [None, "rank-8", "rslora", "embeddings"]
    for name in names[1:]:
        engine.load_adapter(str(name), adapters[str(name)])
    requests = requests_for(names, per_name=2)
    for request, output in zip(requests, engine.generate(requests), strict=True):
        right = statistics.mean(differences(oracles[request.adapter], request, output))
        assert right < 0.08
        assert right < statistics.mean(differences(oracles["rank-33"], request, output)) / 5


FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "attention and MLP biases": {"attention_bias": True, "mlp_bias": True},
    "no grouped heads": {"num_key_value_heads": 4},
    "explicit head_dim": {"head_dim": 24},
    "llama 3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "rope_theta": 500.0,
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}},
    "mistral with a window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 9,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen2 with windows in upper layers": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "smollm3": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree(tmp_path: Path, family: str) -> None:
    model = tiny_llama(tmp_path / "model", **FAMILIES[family])
    adapter = lora_adapter(tmp_path / "adapter", model, rank=5)
    engine = Engine(EngineConfig(model, dtype="float32", threads=1, tokens_per_page=8, max_batch_tokens=48))
    engine.load_adapter("adapter", adapter)
    requests = requests_for([None, "adapter"], per_name=3)
    check(requests, engine.generate(requests), {None: Oracle(model), "adapter": Oracle(model, adapter)})
