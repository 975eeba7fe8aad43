"""The public API: text, finish reasons, usage, rejected requests, cancellation and adapters."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine import (
    AdapterError,
    AdapterInUseError,
    ConfigurationError,
    Engine,
    EngineConfig,
    EngineError,
    InvalidRequestError,
    ModelError,
    Output,
    PromptTooLongError,
    Request,
    SamplingParams,
    UnknownAdapterError,
)
from tests.builders import EOS_TOKEN_ID, lora_adapter, tiny_llama

PAGE_BYTES = 3 * 2 * 32 * 8 * 4
"""3 layers, keys and values of 32 elements, 8 tokens, fp32: one adapter tile a layer."""


def engine_for(model: Path, pages: int = 150, **options: int) -> Engine:
    settings = {"tokens_per_page": 8, "threads": 1, "pool_bytes": pages * PAGE_BYTES} | options
    return Engine(EngineConfig(model, dtype="float32", **settings))  # type: ignore[arg-type]  # all of them are ints


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    return lora_adapter(tmp_path_factory.mktemp("adapters") / "one", model_dir, rank=4)


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return engine_for(model_dir)


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 266) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def greedy(max_tokens: int = 16, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]  # checked by the class


def one(engine: Engine, request: Request) -> Output:
    return engine.generate([request])[0]


def run_to_end(engine: Engine) -> dict[str, Output]:
    finished = {}
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step()}
    return finished


def test_length_and_usage(engine: Engine) -> None:
    output = one(engine, Request(prompt_token_ids=[5, 6, 7], sampling=greedy(9, ignore_eos=True)))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 9
    assert (output.usage.prompt_tokens, output.usage.cached_tokens, output.usage.completion_tokens) == (3, 0, 9)
    assert output.first_token_s is not None
    assert output.first_token_s >= 0
    assert output.error is None
    assert output.logprobs is None


def test_end_of_sequence_stops_unless_ignored(model_dir: Path) -> None:
    engine = engine_for(model_dir)
    hot = [greedy(200, temperature=10.0, seed=seed, ignore_eos=True) for seed in range(10)]
    outputs = engine.generate([Request(prompt_token_ids=[9], sampling=sampling) for sampling in hot])
    free, sampling = next((o, s) for o, s in zip(outputs, hot, strict=True) if EOS_TOKEN_ID in o.token_ids[:-1])
    end = free.token_ids.index(EOS_TOKEN_ID)
    output = one(engine, Request(prompt_token_ids=[9], sampling=replace(sampling, ignore_eos=False)))
    assert output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: end + 1]
    assert "<|im_end|>" not in output.text
    assert free.text.startswith(output.text)


def test_stop_strings_can_span_tokens(engine: Engine) -> None:
    request = {"prompt": "the thing in the", "sampling": greedy(40, temperature=2.0, seed=1, ignore_eos=True)}
    whole = one(engine, Request(**request))  # type: ignore[arg-type]
    assert len(whole.text) > 20
    for start in (3, 7, 12):
        stop = whole.text[start : start + 3]
        sampling = greedy(40, temperature=2.0, seed=1, ignore_eos=True, stop=("never there", stop))
        output = one(engine, Request(prompt="the thing in the", sampling=sampling))
        assert output.finish_reason == "stop"
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 40


def test_a_stop_string_in_the_prompt_is_ignored(engine: Engine) -> None:
    output = one(engine, Request(prompt="stop", sampling=greedy(5, stop=("stop",), ignore_eos=True)))
    assert len(output.token_ids) == 5


def test_text_messages_and_token_ids_are_equivalent(engine: Engine) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    by_messages = Request(messages=[{"role": "user", "content": "hi"}], sampling=greedy())
    by_text = Request(prompt=text, sampling=greedy())
    by_ids = Request(prompt_token_ids=engine.tokenizer.encode(text), sampling=greedy())
    assert len({output.token_ids for output in engine.generate([by_messages, by_text, by_ids])}) == 1


@pytest.mark.parametrize(
    ("request_", "error", "sentence"),
    [
        (Request(), InvalidRequestError, "exactly one of prompt_token_ids, prompt and messages"),
        (Request(prompt="a", prompt_token_ids=[1]), InvalidRequestError, "exactly one of"),
        (Request(prompt=""), InvalidRequestError, "the prompt has no tokens"),
        (Request(prompt_token_ids=[]), InvalidRequestError, "the prompt has no tokens"),
        (Request(prompt_token_ids=[320]), InvalidRequestError, "token id 320 is outside the vocabulary of 320"),
        (Request(prompt_token_ids=[-1]), InvalidRequestError, "token id -1 is outside"),
        (Request(prompt="a", adapter="none"), UnknownAdapterError, "adapter 'none' is not loaded"),
        (
            Request(prompt_token_ids=[5] * 500, sampling=greedy(13)),
            PromptTooLongError,
            "500 prompt tokens and max_tokens 13 exceed the model's context of 512 tokens",
        ),
        (
            Request(prompt_token_ids=[5] * 400, sampling=greedy(100)),
            PromptTooLongError,
            rf"need {63 * PAGE_BYTES} bytes of KV; the pool has {50 * PAGE_BYTES}",
        ),
    ],
)
def test_rejects_invalid_requests_before_any_request_runs(
    model_dir: Path, request_: Request, error: type[EngineError], sentence: str
) -> None:
    engine = engine_for(model_dir, pages=50)
    good = Request(prompt="a", sampling=greedy(2))
    with pytest.raises(error, match=sentence):
        engine.generate([good, request_])
    assert not engine.has_work
    assert len(one(engine, good).token_ids) == 2


def test_a_request_id_is_unique_among_unfinished_requests(engine: Engine) -> None:
    assert engine.add(Request(request_id="a", prompt="x", sampling=greedy(3))) == "a"
    with pytest.raises(InvalidRequestError, match="request_id 'a' is already in the engine"):
        engine.add(Request(request_id="a", prompt="x"))
    assert set(run_to_end(engine)) == {"a"}
    engine.add(Request(request_id="a", prompt="x", sampling=greedy(3)))
    assert set(run_to_end(engine)) == {"a"}


def test_generate_leaves_outputs_of_other_requests_to_step(engine: Engine) -> None:
    engine.add(Request(request_id="other", prompt="x", sampling=greedy(1)))
    engine.generate([Request(prompt="y", sampling=greedy(6))])
    assert engine.has_work
    assert [output.request_id for output in engine.step()] == ["other"]
    assert not engine.has_work


def test_requests_join_and_leave_a_running_batch(engine: Engine) -> None:
    requests = [
        Request(request_id=str(i), prompt_token_ids=p, sampling=greedy(5 + 3 * i)) for i, p in enumerate(prompts(6))
    ]
    alone = {request.request_id: one(engine, request).token_ids for request in requests}
    finished: dict[str, Output] = {}
    for request in requests:
        engine.add(request)
        finished |= {output.request_id: output for output in engine.step()}
    finished |= run_to_end(engine)
    assert {name: output.token_ids for name, output in finished.items()} == alone


def test_cancelling_a_request_frees_its_pages(engine: Engine) -> None:
    ids = [engine.add(Request(prompt_token_ids=p, sampling=greedy(30, ignore_eos=True))) for p in prompts(8)]
    engine.step()
    engine.step()
    assert engine._residency.num_available < engine._pool.num_pages
    assert engine.cancel(ids[0])
    assert not engine.cancel(ids[0])
    assert not engine.cancel("never seen")
    engine._pool.check_integrity()
    assert set(run_to_end(engine)) == set(ids[1:])
    assert engine._residency.num_available == engine._pool.num_pages


def test_tokens_are_the_same_in_chunks_and_after_preemption(model_dir: Path, adapter_dir: Path) -> None:
    requests = [
        Request(prompt_token_ids=p, adapter="one" if i % 2 else None, sampling=greedy(40, ignore_eos=True))
        for i, p in enumerate(prompts(10, longest=60))
    ]
    roomy = engine_for(model_dir)
    tight = engine_for(model_dir, pages=32)
    chunked = engine_for(model_dir, max_batch_tokens=9, max_batch_size=9)
    results = []
    for engine in (roomy, tight, chunked):
        engine.load_adapter("one", adapter_dir)
        results.append([output.token_ids for output in engine.generate(requests)])
    assert results[0] == results[1] == results[2]
    assert roomy._scheduler.num_preemptions == 0
    assert tight._scheduler.num_preemptions > 0


def test_adapters_can_be_loaded_replaced_and_unloaded(
    engine: Engine, adapter_dir: Path, model_dir: Path, tmp_path: Path
) -> None:
    info = engine.load_adapter("one", adapter_dir)
    assert engine.adapters == {"one": info}
    assert (info.rank, info.num_bytes) == (4, 17 * PAGE_BYTES)
    assert engine.load_adapter("one", adapter_dir) is info
    with_it = one(engine, Request(prompt="x", adapter="one", sampling=greedy()))
    assert with_it.token_ids != one(engine, Request(prompt="x", sampling=greedy())).token_ids
    running = engine.add(Request(prompt="x", adapter="one", sampling=greedy()))
    other = lora_adapter(tmp_path / "other", model_dir, rank=4, seed=9)
    with pytest.raises(AdapterInUseError, match="adapter 'one' still has 1 unfinished requests"):
        engine.unload_adapter("one")
    with pytest.raises(AdapterInUseError):
        engine.load_adapter("one", other)
    engine.cancel(running)
    engine.load_adapter("one", other)
    assert one(engine, Request(prompt="x", adapter="one", sampling=greedy())).token_ids != with_it.token_ids
    engine.unload_adapter("one")
    assert engine.adapters == {}
    with pytest.raises(UnknownAdapterError, match="adapter 'one' is not loaded"):
        engine.unload_adapter("one")


def test_a_broken_adapter_is_not_loaded(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist"):
        engine.load_adapter("broken", tmp_path)
    assert engine.adapters == {}


def test_an_adapter_that_overflows_fails_alone(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    engine.load_adapter("wild", lora_adapter(tmp_path / "wild", model_dir, alpha=1e6, strength=1e30))
    good = Request(prompt="the thing", sampling=greedy(12, ignore_eos=True))
    alone = one(engine, good)
    bad, other = engine.generate([Request(prompt="x", adapter="wild"), good])
    assert "adapter 'wild' computed NaN or infinite values" in str(bad.error)
    assert other.token_ids == alone.token_ids
    for _ in range(3):
        assert one(engine, good).token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, bfloat16, float16"),
        ({"max_batch_size": 0}, "max_batch_size is 0; it must be at least 1"),
        ({"threads": -1}, "threads is -1"),
        ({"max_batch_tokens": 3}, "max_batch_tokens is 3; it must be at least max_batch_size, 32"),
    ],
)
def test_errors_name_the_invalid_setting(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        EngineConfig("model", **options)  # type: ignore[arg-type]


def test_too_small_a_pool_is_reported_with_numbers(model_dir: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"pool_bytes is 100, but one page of this model takes {PAGE_BYTES} bytes; raise pool"
    ):
        engine_for(model_dir, pool_bytes=100)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, r"sampling\.temperature is -1\.0"),
        ({"temperature": float("nan")}, r"sampling\.temperature is nan"),
        ({"top_p": 0.0}, r"sampling\.top_p is 0\.0; it must be above 0"),
        ({"max_tokens": 0}, r"sampling\.max_tokens is 0"),
        ({"stop": ("",)}, r"sampling\.stop must be a tuple of non-empty strings"),
        ({"stop": "end"}, r"sampling\.stop must be"),
        ({"seed": -1}, r"sampling\.seed is -1"),
        ({"logprobs": 21}, r"sampling\.logprobs is 21"),
    ],
)
def test_errors_name_the_invalid_sampling_parameter(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        Engine(EngineConfig(tmp_path))


def test_a_request_displaces_another_that_continues_afterwards(model_dir: Path) -> None:
    engine = Engine(EngineConfig(model=model_dir, dtype="float32", max_batch_size=2))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = {name: [5 + index, 6, 7] for index, name in enumerate(("first", "second", "urgent"))}
    alone = {
        name: engine.generate([Request(prompt_token_ids=ids, sampling=params)])[0] for name, ids in prompts.items()
    }
    for name in ("first", "second"):
        engine.add(Request(request_id=name, prompt_token_ids=prompts[name], sampling=params))
    for _ in range(4):
        assert engine.step() == []
    engine.add(Request(request_id="urgent", prompt_token_ids=prompts["urgent"], sampling=params, displaces="second"))
    before = engine.stats
    outputs = engine.step()
    assert (engine.stats - before).prefill_tokens == 3, "it runs in the next step"
    while engine.has_work:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["first", "urgent", "second"]
    assert {output.request_id: output.token_ids for output in outputs} == {
        name: output.token_ids for name, output in alone.items()
    }
