"""`loraq bench engine` says how fast the engine is, as one JSON object."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.bench.commands import bench
from services.bench.workload import prompt
from services.errors import InputError
from tests.builders import lora_adapter, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for index in range(3):
        lora_adapter(root / f"a{index:02d}", model, rank=2 + index, seed=index)
    return root


def arguments(model: Path, *more: str) -> list[str]:
    small = ["--requests", "4", "--prompt-len", "5", "--new-tokens", "6", "--repeats", "2", "--threads", "1"]
    return ["engine", "--model", str(model), "--dtype", "float32", *small, *more]


def test_base_only(model: Path) -> None:
    result = CliRunner().invoke(bench, arguments(model, "--json"), catch_exceptions=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["output_tokens_per_s"] > 0
    assert report["requests"] == 4
    assert report["distinct"] == 0
    assert report["output_tokens_per_s"] == pytest.approx(24 / report["wall_s"], rel=0.01)
    assert 0 < report["first_token_s"] <= report["first_token_max_s"] <= report["wall_s"] * 1.5
    assert report["peak_rss_mb"] > 50
    assert len(report["wall_all_s"]) == 2
    assert "run 2 of 2" in result.stderr


def test_distinct_adapters_and_cold_start(model: Path, adapters: Path) -> None:
    more = ("--adapters", str(adapters), "--distinct", "3", "--cold", "--json")
    result = CliRunner().invoke(bench, arguments(model, *more), catch_exceptions=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["distinct"] == 3
    assert report["adapter_mb"] > 0
    assert report["warm_first_token_s"] > 0
    assert report["cold_first_token_s"] > 0


def test_for_people(model: Path) -> None:
    result = CliRunner().invoke(bench, arguments(model), catch_exceptions=False)
    assert "output_tokens_per_s" in result.stdout


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--distinct", "2"], "--distinct 2 needs --adapters DIR"),
        (["--distinct", "9", "--adapters", "ADAPTERS"], "holds 3 adapters, fewer than --distinct 9"),
        (["--new-tokens", "600"], "exceed the model's context of 512 tokens"),
    ],
)
def test_says_what_is_missing(model: Path, adapters: Path, more: list[str], sentence: str) -> None:
    given = [str(adapters) if word == "ADAPTERS" else word for word in more]
    with pytest.raises(InputError, match=sentence):
        CliRunner().invoke(bench, arguments(model, *given), catch_exceptions=False)


def test_prompts_depend_on_their_number_alone() -> None:
    assert prompt(3, 8, 49152)[:5] == prompt(3, 5, 49152)
    assert prompt(0, 4, 49152) == [8843, 27220, 34442, 21214]
