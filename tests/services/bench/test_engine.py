"""`loraq bench engine` reports the engine's performance as one JSON object."""

import json
import signal
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from engine import adapter_digest
from engine.files.model_config import read_model_config
from engine.lora.checked import check
from services.bench.commands import bench
from services.bench.engine.adapters import adapter_dirs, cycle, zipf
from services.bench.engine.run import prompt
from services.errors import InputError
from services.process.settings import Settings
from tests.builders import lora_adapter, tiny_llama
from tests.processes import spawn
from tests.waiting import eventually_sync


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
    more = ("--adapters", str(adapters), "--distinct", "3", "--json")
    result = CliRunner().invoke(bench, arguments(model, *more), catch_exceptions=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["distinct"] == report["registered"] == 3
    assert report["adapter_mb"] > 0
    assert report["run_adapter_loads"] == 0
    assert report["hit_rate"] == 1
    assert report["warm_first_token_s"] > 0
    assert report["cold_first_token_s"] > 0


def test_random_adapters_where_no_directory_is_given(model: Path) -> None:
    """For all seven projections, with ranks in turn, the same in every run."""
    config = read_model_config(model)
    files = []
    for _ in range(2):
        with adapter_dirs(None, config, 5) as created:
            checked = [check(path, config).info for path in created]
            assert [info.rank for info in checked] == [8, 16, 32, 64, 8]
            assert {len(info.target_modules) for info in checked} == {7}
            files.append([adapter_digest(path) for path in created])
    assert files[0] == files[1]
    assert len(set(files[0])) == 5
    result = CliRunner().invoke(bench, arguments(model, "--distinct", "2", "--json"), catch_exceptions=False)
    assert json.loads(result.stdout.splitlines()[-1])["registered"] == 2


def test_many_registered_and_few_in_use(model: Path, adapters: Path) -> None:
    more = ("--adapters", str(adapters), "--registered", "20", "--distinct", "2", "--no-cold", "--json")
    result = CliRunner().invoke(bench, arguments(model, *more), catch_exceptions=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["registered"], report["distinct"], report["hit_rate"]) == (20, 2, 1)
    assert report["cold_first_token_s"] is None
    assert sorted(adapters.iterdir()) == [adapters / f"a{index:02d}" for index in range(3)]


def test_popularity_by_zipfs_law_in_a_small_pool(model: Path, adapters: Path) -> None:
    """Adapters that do not fit at once are loaded again, and the report has the number and size of the loads."""
    pool = ("--pool-bytes", str(128 * 1024), "--requests", "24", "--batch", "2")
    more = ("--adapters", str(adapters), "--registered", "30", "--popularity", "zipf", "--json", *pool)
    result = CliRunner().invoke(bench, arguments(model, *more), catch_exceptions=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["popularity"] == "zipf"
    assert report["batch"] == 2
    assert 1 < report["distinct"] <= 24
    assert report["run_adapter_loads"] > 0
    assert report["run_adapter_mb_in"] > 0
    assert report["run_adapter_mb_out"] > 0
    assert 0 < report["hit_rate"] < 1


def test_zipf_draws_the_first_most_often_and_differently_in_every_run() -> None:
    drawn = zipf(10_000, 1000, 1)
    assert drawn != zipf(10_000, 1000, 2)
    assert drawn == zipf(10_000, 1000, 1)
    assert drawn.count(0) / len(drawn) == pytest.approx(1 / sum(1 / k for k in range(1, 1001)), abs=0.02)
    assert max(drawn) > 900


def test_cycle_uses_each_in_turn() -> None:
    assert cycle(5, 2) == [0, 1, 0, 1, 0]


def test_the_table(model: Path) -> None:
    result = CliRunner().invoke(bench, arguments(model), catch_exceptions=False)
    assert "output_tokens_per_s" in result.stdout


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--distinct", "9", "--adapters", "ADAPTERS"], "contains 3 adapters, fewer than --distinct 9"),
        (
            ["--registered", "9", "--distinct", "10"],
            "--registered 9 needs --distinct between 1 and 9",
        ),
        (["--popularity", "zipf", "--distinct", "2"], "draws from --registered N adapters"),
        (["--new-tokens", "600"], "exceed the model's context of 512 tokens"),
    ],
)
def test_invalid_options_are_reported(model: Path, adapters: Path, more: list[str], sentence: str) -> None:
    given = [str(adapters) if word == "ADAPTERS" else word for word in more]
    with pytest.raises(InputError, match=sentence):
        CliRunner().invoke(bench, arguments(model, *given), catch_exceptions=False)


def test_prompts_depend_on_their_number_only() -> None:
    assert prompt(3, 8, 49152)[:5] == prompt(3, 5, 49152)
    assert prompt(0, 4, 49152) == [8843, 27220, 34442, 21214]


ENDLESS = ("--distinct", "3", "--registered", "9", "--repeats", "100000")
SCHEDULING = (
    "--adapters",
    "9",
    "--jobs",
    "100000",
    "--prompt-len",
    "4",
    "--new-tokens",
    "4",
    "--pool-bytes",
    "1500000",
)


@pytest.mark.parametrize(("benchmark", "progress"), [("engine", "run 1 of"), ("scheduling", "")])
def test_a_run_ended_by_sigterm_leaves_nothing(
    model: Path, tmp_path: Path, settings: Settings, benchmark: str, progress: str
) -> None:
    scheduling = ["scheduling", "--model", str(model), *SCHEDULING]
    command = arguments(model, *ENDLESS) if benchmark == "engine" else scheduling
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with spawn(["bench", *command], settings, {"TMPDIR": str(scratch)}, ready_timeout_s=None) as process:
        eventually_sync(lambda: len(list(scratch.glob("loraq-bench-*"))) == 2, what="random adapters and their copies")
        eventually_sync(lambda: progress in process.log, what="the first run")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
    assert list(scratch.iterdir()) == []
    assert not [child for child in children if child.is_running()]
