"""After a warm-up, no request waits for kernel compilation."""

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.measure.compiled import variant_of
from tests.builders import lora_adapter, tiny_llama
from tests.engine.ondevice.engines import backend_for, request, sampling_only, without_logits

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_warm_up_launches_every_kernel_that_requests_launch(
    tmp_path: Path, max_batch_size: int, *, invariant: bool
) -> None:
    """Prompts short and long, alone and in a batch, with and without adapters, in all sampling modes.

    Only the sampling kernels run: the results of the others do not affect what is launched.
    """
    model = tiny_llama(tmp_path / "model", **SIZES)
    started: set[object] = set()
    sample = sampling_only()

    def noted(launch: Launch) -> None:
        started.add(variant_of(launch))
        sample(launch)

    config = EngineConfig(
        model,
        device="cuda",
        dtype="bfloat16",
        max_batch_size=max_batch_size,
        max_batch_tokens=40,
        pool_bytes=2**21,
        host_bytes=2**22,
        threads=1,
        batch_invariant=invariant,
    )
    engine = without_logits(Engine(config, backend_for(config, noted)), max_batch_size)
    engine.warm_up()
    warm = set(started)
    for index, rank in enumerate((3, 17)):
        engine.load_adapter(str(index), lora_adapter(tmp_path / str(rank), model, rank=rank, seed=rank))
    drawn, restricted = {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}
    prompt = list(range(5, 60))
    asked = [
        request(None, prompt[:37]),
        request(0, prompt[:20], **drawn),
        request(1, [7], **restricted),
        request(0, prompt),
        *(request(index % 2, prompt[: 9 * index + 1]) for index in range(5)),
        *(request(0, [index + 1]) for index in range(5)),
        *(request(None, [index + 1], **drawn) for index in range(5)),
    ]
    assert [output.error for output in engine.generate(asked)] == [None] * len(asked)
    assert started - warm == set()
    assert len(warm) > 15
    engine.close()
