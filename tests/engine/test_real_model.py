"""SmolLM2-135M-Instruct with the trained example adapters, against transformers + PEFT."""

from pathlib import Path

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams
from tests.engine.oracles import Oracle, differences

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "adapters"
ADAPTERS = sorted(path.parent for path in EXAMPLES.glob("*/adapter_model.safetensors"))

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.skipif(not ADAPTERS, reason="the example adapters are not in this checkout")
def test_agrees_on_the_real_model(base_model_dir: Path) -> None:
    """The base model and every adapter in one batch, in fp32, to 1e-4."""
    engine = Engine(EngineConfig(base_model_dir, dtype="float32", threads=1, pool_bytes=2**28))
    for adapter in ADAPTERS:
        engine.load_adapter(adapter.name, adapter)
    ids = engine.tokenizer.encode_chat(QUESTION)
    sampling = SamplingParams(max_tokens=16, logprobs=20)
    names = [None, *(adapter.name for adapter in ADAPTERS)]
    requests = [Request(prompt_token_ids=ids, adapter=name, sampling=sampling) for name in names]
    outputs = engine.generate(requests)
    assert len({output.text for output in outputs}) > len(ADAPTERS) // 2
    assert outputs[0].text == "The capital of France is Paris."
    assert outputs[0].finish_reason == "stop"
    for request, output, adapter in zip(requests, outputs, [None, *ADAPTERS], strict=True):
        assert max(differences(Oracle(base_model_dir, adapter), request, output)) < 1e-4, request.adapter


def test_bfloat16_gives_the_right_answer(base_model_dir: Path) -> None:
    engine = Engine(EngineConfig(base_model_dir, dtype="bfloat16", threads=1, pool_bytes=2**28))
    request = Request(messages=QUESTION, sampling=SamplingParams(max_tokens=24))
    assert [output.text for output in engine.generate([request] * 3)] == ["The capital of France is Paris."] * 3
