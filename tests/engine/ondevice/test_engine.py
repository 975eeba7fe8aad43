"""The engine on the Triton kernels: correct, batch-invariant, and exact under eviction."""

from pathlib import Path

import pytest
import torch

from engine import EngineConfig
from engine.kernels.triton import TritonKernels
from engine.step.runner import RemoteRunner
from tests.builders import ALL_LINEAR, lora_adapter, tiny_llama
from tests.engine.ondevice.engines import engine_on, observed, request, waits_raise
from tests.engine.ondevice.fake_gpu import FakeSecondStream
from tests.engine.oracles import MergedOracle, Oracle, differences

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TOLERANCE = 1e-4
FUSED_PRODUCTS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, **SIZES)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        lora_adapter(root / "0", model_dir, rank=3, seed=0),
        lora_adapter(root / "1", model_dir, rank=17, seed=1, alpha=6, use_rslora=True, targets=("q_proj", "down_proj")),
        lora_adapter(root / "2", model_dir, rank=4, seed=2, targets=(*ALL_LINEAR, "embed_tokens", "lm_head")),
    ]


def test_one_batch_of_all_equals_weights_merged_by_hand(model_dir: Path, adapters: list[Path]) -> None:
    """Prefill and a decode step: the base model and adapters of three ranks, one of them with embedding and head."""
    engine = engine_on(model_dir, adapters)
    oracles = {
        None: Oracle(model_dir),
        "0": MergedOracle(model_dir, adapters[0], lambda module, rank: 2.0),
        "1": MergedOracle(model_dir, adapters[1], lambda module, rank: 6 / 17**0.5),
        "2": Oracle(model_dir, adapters[2]),
    }
    requests = [request(None, [7, 9]), request(0, [8, 5, 30]), request(1, [100, 12]), request(2, [44, 45, 46])]
    for asked, output in zip(requests, engine.generate(requests), strict=True):
        assert max(differences(oracles[asked.adapter], asked, output)) < TOLERANCE, asked.adapter
        others = [oracle for name, oracle in oracles.items() if name != asked.adapter]
        assert min(max(differences(oracle, asked, output)) for oracle in others) > 10 * TOLERANCE


def test_bf16_is_the_same_alone_chunked_cached_and_in_any_mix(model_dir: Path, adapters: list[Path]) -> None:
    """With `batch_invariant`, bit for bit, including randomly sampled tokens."""
    options = {"dtype": "bfloat16", "batch_invariant": True}
    shared = list(range(20, 29))
    requests = [
        request(0, shared),
        request(1, [*shared, 5], temperature=0.8, seed=3),
        request(0, [*shared, 60, 61]),
    ]
    alone = engine_on(model_dir, adapters[:2], prefix_cache=False, **options)
    expected = [observed(alone.generate([one]))[0] for one in requests]
    mixed = engine_on(model_dir, adapters[:2], max_batch_tokens=13, **options)
    assert observed(mixed.generate(requests)) == expected
    again = mixed.generate([requests[2]])
    assert again[0].usage.cached_tokens == 8
    assert observed(again) == expected[2:3]


@pytest.mark.parametrize("lora_stream", [False, True], ids=["one stream", "two streams"])
def test_recorded_decode_steps_compute_the_same_as_eager_ones(
    model_dir: Path, adapters: list[Path], *, lora_stream: bool
) -> None:
    """Including for adapters and ranks that were not in the recorded batch."""
    mixes = [
        [request(0, [7, 9], 3), request(None, [8], 3)],
        [request(1, [7, 9, 11], 3), request(0, [12], 3, temperature=0.9, seed=1)],
        [request(None, [15], 3), request(1, [16, 17], 3)],
    ]
    eager = engine_on(model_dir, adapters[:2], graphs=False)
    expected = [observed(eager.generate(mix)) for mix in mixes]
    recorded = engine_on(model_dir, adapters[:2], lora_stream=lora_stream)
    runner = recorded._runner
    assert isinstance(runner, RemoteRunner)
    assert runner.graphs is not None
    for mix, output in zip(mixes, expected, strict=True):
        assert observed(recorded.generate(mix)) == output
        assert len(runner.graphs) == 1
    kernels = recorded._backend.kernels
    assert isinstance(kernels, TritonKernels)
    assert (kernels._second_stream is not None) == lora_stream
    if isinstance(kernels._second_stream, FakeSecondStream):
        assert kernels._second_stream.forks == FUSED_PRODUCTS


def test_a_step_waits_for_the_device_once(model_dir: Path, adapters: list[Path]) -> None:
    """For an event, to read its tokens. Torch raises at any other wait: values read back, copies of pageable memory."""
    engine = engine_on(model_dir, adapters)
    requests = [
        request(None, [7, 9], 4),
        request(0, [8, 5, 30], 4, temperature=0.8, seed=3, top_k=5, top_p=0.9),
        request(1, [100, 12], 4, repetition_penalty=1.2, presence_penalty=0.5),
        request(2, [44, 45, 46], 4, temperature=1.0, seed=4),
    ]
    engine.generate(requests)  # loads adapters, compiles and records
    with waits_raise():
        with pytest.raises(RuntimeError, match="synchronizing"):
            int(torch.ones(1, device="cuda"))
        outputs = engine.generate(requests)
    assert [output.error for output in outputs] == [None] * len(requests)


def test_adapters_that_evict_each_other_repeat_exactly(model_dir: Path, adapters: list[Path]) -> None:
    roomy = engine_on(model_dir, adapters[:2])
    sizes = [info.num_bytes for info in roomy.adapters.values()]
    page = roomy._storage.bytes_per_page_id
    requests = [request(i % 2, [7, 9 + i // 2]) for i in range(3)]
    expected = [observed(roomy.generate([one]))[0] for one in requests]
    tight = engine_on(model_dir, adapters[:2], pool_bytes=max(sizes) + 2 * page)
    assert [observed(tight.generate([one]))[0] for one in requests] == expected
    assert tight._residency.num_evictions >= 2
    tight._pool.check_integrity()


def test_the_configuration_accepts_a_device_index(model_dir: Path) -> None:
    assert EngineConfig(model_dir, device="cuda:1").device == "cuda:1"
