"""An invalid request ends alone with an InvalidRequestError that names its field; other requests continue."""

import contextlib
import json
import random
import time
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, InvalidRequestError, PromptTooLongError, Request, RequestError, SamplingParams
from tests.builders import tiny_llama

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
HEALTHY = Request(prompt="the thing", sampling=GREEDY)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    return Engine(EngineConfig(model, dtype="float32", threads=1, pool_bytes=2**22, tokens_per_page=8))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> tuple[int, ...]:
    return engine.generate([HEALTHY])[0].token_ids


class Odd:
    """Neither a string nor a number, and not even printable."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


class OddList(list[Any]):
    """Raises on every access."""

    def __iter__(self) -> Any:
        raise LookupError("not this one")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**70), 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3),
    st.binary(max_size=4),
    st.builds(Odd),
    st.builds(OddList, st.just([1])),
    st.decimals(allow_nan=True).map(Decimal),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), 1j, range(3), object, len, {1}, ...]),
    st.lists(st.integers(0, 9), max_size=3).map(np.array),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=3), inner)
)
KEYS = st.sampled_from(["role", "content", "name"]) | st.integers() | st.none() | st.text(max_size=3)
MESSAGES = st.lists(st.dictionaries(KEYS, VALUES) | VALUES, max_size=3)


def try_and_go_on(engine: Engine, expected: tuple[int, ...], request: Any) -> None:
    """Add a request next to a healthy one. A refusal has a reason, and the healthy one ends as expected."""
    healthy = engine.add(HEALTHY)
    odd = ""
    with contextlib.suppress(RequestError):
        odd = engine.add(request)
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        if odd and healthy in outputs:
            engine.cancel(odd)
    assert outputs[healthy].token_ids == expected
    assert outputs[healthy].error is None


SLOW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(st.data())
def test_any_value_in_any_field_ends_at_most_that_request(
    engine: Engine, expected: tuple[int, ...], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from([field.name for field in fields(Request)]), min_size=1, max_size=3))
    given_fields = {name: data.draw(VALUES, label=name) for name in chosen}
    if "prompt" not in given_fields and data.draw(st.booleans()):
        given_fields["prompt"] = "a"
    try_and_go_on(engine, expected, Request(**given_fields))


@SLOW
@given(MESSAGES)
def test_any_messages_end_at_most_that_request(engine: Engine, expected: tuple[int, ...], messages: Any) -> None:
    try_and_go_on(engine, expected, Request(messages=messages, sampling=GREEDY))


@SLOW
@given(st.data())
def test_any_value_in_any_field_of_sampling_is_refused_or_served(
    engine: Engine, expected: tuple[int, ...], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from([field.name for field in fields(SamplingParams)]), max_size=4))
    given_fields = {name: data.draw(VALUES, label=name) for name in chosen}
    with contextlib.suppress(InvalidRequestError):
        sampling = SamplingParams(**given_fields)
        try_and_go_on(engine, expected, Request(prompt="a", sampling=sampling))


@pytest.mark.parametrize(
    ("given_fields", "sentence"),
    [
        ({"prompt_token_ids": [4.5]}, r"prompt_token_ids\[0\] must be a whole number, not float"),
        ({"prompt_token_ids": [4, True]}, r"prompt_token_ids\[1\] must be a whole number, not bool"),
        ({"prompt_token_ids": np.array([4, 5])}, "prompt_token_ids must be a list, not ndarray"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids must be a list, not bytes"),
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list, not int"),
        ({"prompt": b"text"}, "prompt must be a string, not bytes"),
        ({"prompt": "a\ud800b"}, r"prompt holds a lone surrogate, U\+D800, at character 1"),
        ({"messages": "hello"}, "messages must be a list, not str"),
        ({"messages": ["hello"]}, r"messages\[0\] must be a mapping, not str"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]\.content must be a string, not NoneType"),
        ({"messages": [{"role": "user", "content": [{}]}]}, r"messages\[0\]\.content must be a string, not list"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, r"messages\[0\]\.content holds a lone surrogate"),
        (
            {"messages": [{"role": "user"}]},
            "chat template rejects the messages: 'dict object' has no attribute 'content'",
        ),
        ({"prompt": "a", "adapter": ["x"]}, "adapter must be a string, not list"),
        ({"prompt": "a", "tenant": None}, "tenant must be a string, not NoneType"),
        ({"prompt": "a", "tenant": "\ud800"}, "tenant holds a lone surrogate"),
        ({"prompt": "a", "request_id": 7}, "request_id must be a string, not int"),
        ({"prompt": "a", "sampling": {"max_tokens": 4}}, "sampling must be SamplingParams, not dict"),
        ({"prompt": "a", "sampling": None}, "sampling must be SamplingParams, not NoneType"),
        ({"prompt": "a", "allow_special_tokens": "no"}, "allow_special_tokens must be true or false, not str"),
        ({"prompt": "a", "displaces": 3}, "displaces must be a string, not int"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(engine: Engine, given_fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        engine.add(Request(**given_fields))


@pytest.mark.parametrize(
    ("given_fields", "sentence"),
    [
        ({"max_tokens": 1.5}, r"sampling\.max_tokens must be a whole number, not float"),
        ({"max_tokens": True}, r"sampling\.max_tokens must be a whole number, not bool"),
        ({"max_tokens": "8"}, r"sampling\.max_tokens must be a whole number, not str"),
        ({"temperature": "hot"}, r"sampling\.temperature must be a number, not str"),
        ({"temperature": None}, r"sampling\.temperature must be a number, not NoneType"),
        ({"top_k": 2.0}, r"sampling\.top_k must be a whole number, not float"),
        ({"seed": 1.0}, r"sampling\.seed must be a whole number, not float"),
        ({"logprobs": [1]}, r"sampling\.logprobs must be a whole number, not list"),
        ({"stop": 5}, r"sampling\.stop must be a tuple of non-empty strings"),
        ({"stop": {"a"}}, r"sampling\.stop must be a tuple of non-empty strings"),
        ({"ignore_eos": 1}, r"sampling\.ignore_eos must be true or false, not int"),
    ],
)
def test_a_sampling_parameter_of_the_wrong_type_is_named(given_fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        SamplingParams(**given_fields)


def test_an_object_that_is_not_a_request_is_rejected(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"a request must be an engine\.Request, not dict"):
        engine.add({"prompt": "a"})  # type: ignore[arg-type]


def spoil(request: Request, value: object) -> Request:
    """A checked request whose sampling parameters raise in a step."""
    sampling = SamplingParams(max_tokens=4, temperature=1.0)
    object.__setattr__(sampling, "temperature", value)
    return Request(request_id="spoilt", prompt=request.prompt, sampling=sampling)


def test_an_error_of_one_request_in_a_step_ends_only_that_request(engine: Engine, expected: tuple[int, ...]) -> None:
    ids = [engine.add(HEALTHY), engine.add(spoil(HEALTHY, "hot")), engine.add(HEALTHY)]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert [outputs[name].error is None for name in ids] == [True, False, True]
    assert "the request made a step fail: TypeError" in str(outputs["spoilt"].error)
    assert outputs[ids[0]].token_ids == outputs[ids[2]].token_ids == expected
    engine._pool.check_integrity()


def test_an_error_of_one_request_in_its_own_step_ends_it(engine: Engine, expected: tuple[int, ...]) -> None:
    engine.add(spoil(HEALTHY, "hot"))
    (output,) = engine.step()
    assert "the request made a step fail" in str(output.error)
    assert engine.generate([HEALTHY])[0].token_ids == expected


def test_an_error_in_decoding_a_request_ends_only_that_request(
    engine: Engine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine.add(Request(prompt="the thing", sampling=GREEDY))
    failing = engine.add(Request(prompt="the thing", sampling=GREEDY))
    monkeypatch.setattr(engine._requests[failing]._text, "push", lambda _token_id: 1 / 0)  # type: ignore[index]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert "ZeroDivisionError" in str(outputs[failing].error)
    assert outputs[other].token_ids == expected


def test_a_step_that_fails_for_every_request_is_an_engine_error(engine: Engine, expected: tuple[int, ...]) -> None:
    ids = [engine.add(HEALTHY) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_runner", None)
        patch.setattr("engine.engine.build_batch", lambda *_arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    for request_id in ids:
        engine.cancel(request_id)
    assert engine.generate([HEALTHY])[0].token_ids == expected


def test_prepared_in_parallel_with_steps_and_added_later(engine: Engine, expected: tuple[int, ...]) -> None:
    prepared = []
    thread = Thread(target=lambda: prepared.extend(engine.prepare(HEALTHY) for _ in range(20)))
    running = engine.add(Request(prompt="a", sampling=SamplingParams(max_tokens=100, ignore_eos=True)))
    thread.start()
    while thread.is_alive():
        engine.step()
    thread.join()
    ids = [engine.add_prepared(each) for each in prepared]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert all(outputs[each].token_ids == expected for each in ids)
    assert running not in ids


def words(num_bytes: int, seed: int = 0) -> str:
    """Prose of that many bytes."""
    rng = random.Random(seed)
    vocabulary = ["the", "parcel", "arrived", "yesterday", "and", "nobody", "was", "at", "home", "to", "take", "it.\n"]
    text = " ".join(rng.choice(vocabulary) for _ in range(num_bytes // 3))
    return text[:num_bytes]


@pytest.fixture(scope="module")
def real_engine(base_model_dir: Path) -> Engine:
    return Engine(EngineConfig(base_model_dir, threads=1, pool_bytes=2**29))


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_prompt_that_cannot_fit_is_refused_by_its_size(real_engine: Engine, kind: str) -> None:
    """It is not tokenized: 900 KB take more than a second to tokenize, and microseconds to reject."""
    text = words(900_000)
    request = Request(prompt=text) if kind == "prompt" else Request(messages=[{"role": "user", "content": text}])
    took = []
    for _ in range(5):
        began = time.perf_counter()
        with pytest.raises(PromptTooLongError) as refused:
            real_engine.prepare(request)
        took.append(time.perf_counter() - began)
    sentence = r"a prompt of 90\d{4} bytes has at least 111\d\d tokens; these and max_tokens 128 exceed the model's"
    assert refused.match(rf"{sentence} context of 8192 tokens")
    assert min(took) < 0.02, "it was tokenized"


@pytest.mark.parametrize(
    "text",
    [words(600_000), "漢字を書く " * 30_000, "<|im_end|> and " * 30_000, "a" * 400_000, "1" * 400_000, "ab漢" * 90_000],
    ids=["prose", "another script", "markers", "one letter", "digits", "no spaces"],
)
def test_a_long_prompt_is_tokenized_only_until_it_cannot_fit(real_engine: Engine, text: str) -> None:
    began = time.perf_counter()
    assert len(real_engine.tokenizer.encode(text)) > 8192
    whole_s = time.perf_counter() - began
    took = []
    for request in (Request(prompt=text), Request(prompt=text, allow_special_tokens=False)):
        began = time.perf_counter()
        with pytest.raises(
            PromptTooLongError, match=r"the first \d+ of \d+ characters of the prompt have at least \d+ tokens"
        ):
            real_engine.prepare(request)
        took.append(time.perf_counter() - began)
    assert max(took) < 0.7 * whole_s


def test_a_prompt_that_fits_is_never_rejected(real_engine: Engine) -> None:
    """Text of the longest and of the shortest tokens, up to the last token of the context."""
    room = 8192 - 128
    longest = max(range(17, 49_152), key=lambda each: len(real_engine.tokenizer.decode([each]).encode()))
    encode = real_engine.tokenizer.encode
    for text in (real_engine.tokenizer.decode([longest]), " the", "漢", "\n"):
        count = int(64 * room / len(encode(text * 64)))
        ids = encode(text * count)[:room]
        prompt = real_engine.tokenizer.decode(ids)
        prepared = real_engine.prepare(Request(prompt=prompt))
        assert prepared.prompt_ids == tuple(encode(prompt))
        assert len(prepared.prompt_ids) > 0.99 * room


def test_an_error_of_the_template_ends_only_that_request(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    settings_file = model / "tokenizer_config.json"
    template = "{{ messages[0].content[5] }}{{ 1 / (messages[0].content | length - 3) }}"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"chat_template": template}))
    engine = Engine(EngineConfig(model, dtype="float32", threads=1, pool_bytes=2**22, tokens_per_page=8))
    running = engine.add(HEALTHY)
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError: division by zero"):
        engine.add(Request(messages=[{"role": "user", "content": "abc"}]))
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert [output.request_id for output in finished] == [running]
