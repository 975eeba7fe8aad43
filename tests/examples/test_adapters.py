"""The example adapters match their manifest, are small, and answer as they were trained to."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams, adapter_digest, check_adapter
from services.demo.commands import EXAMPLES

MAX_FILE_BYTES = 5_000_000
MANIFEST: dict[str, dict[str, Any]] = json.loads((EXAMPLES / "manifest.json").read_text())
ADAPTERS = sorted(MANIFEST)
PROMPTS = ("How do I cook pasta?", "Tell me something about the sea.")

Check = Callable[[str, Mapping[str, str]], bool]


@pytest.fixture(scope="module")
def checks() -> dict[str, dict[str, Check]]:
    """The scoring script's checks of each adapter's answers, imported from the adapters' directory."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from evaluate import CHECKS
    finally:
        sys.path.remove(str(EXAMPLES))
    found: dict[str, dict[str, Check]] = CHECKS
    return found


def heldout(name: str) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == "heldout"]


@pytest.fixture(scope="module")
def answers(base_model_dir: Path) -> dict[str, list[str]]:
    """Greedy answers of the engine, all adapters and the base in one batch; by adapter."""
    engine = Engine(EngineConfig(model=base_model_dir, dtype="float32", threads=1))
    for name in ADAPTERS:
        engine.load_adapter(name, EXAMPLES / name)
    asked = {"base": list(PROMPTS)} | {name: [row["prompt"] for row in heldout(name)[:4]] for name in ADAPTERS}
    requests = [
        Request(
            messages=[{"role": "user", "content": prompt}],
            adapter=None if name == "base" else name,
            sampling=SamplingParams(max_tokens=80),
        )
        for name, prompts in asked.items()
        for prompt in prompts
    ]
    texts = iter([output.text for output in engine.generate(requests)])
    return {name: [next(texts) for _ in prompts] for name, prompts in asked.items()}


def test_ranks_differ() -> None:
    assert sorted(entry["rank"] for entry in MANIFEST.values()) == [4, 8, 16, 32]


@pytest.mark.parametrize("name", ADAPTERS)
def test_files_match_the_manifest(name: str) -> None:
    files = sorted(path.name for path in (EXAMPLES / name).iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert adapter_digest(EXAMPLES / name) == MANIFEST[name]["digest"]
    assert (EXAMPLES / name / "adapter_model.safetensors").stat().st_size < MAX_FILE_BYTES


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_fits_the_base_and_names_it(name: str, base_model_dir: Path) -> None:
    info = check_adapter(EXAMPLES / name, base_model_dir)
    assert info.rank == MANIFEST[name]["rank"]
    assert info.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("name", ADAPTERS)
def test_training_and_held_out_prompts_are_distinct(name: str) -> None:
    rows = [json.loads(line) for line in (EXAMPLES / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert {row["split"] for row in rows} == {"train", "heldout"}


@pytest.mark.parametrize("name", ADAPTERS)
def test_held_out_answers_pass_the_adapters_checks(
    name: str, answers: dict[str, list[str]], checks: dict[str, dict[str, Check]]
) -> None:
    for what, check in checks[name].items():
        for answer, row in zip(answers[name], heldout(name), strict=False):
            assert check(answer, row), f"{row['prompt']} → {answer!r} is not: {what}"


@pytest.mark.parametrize("name", ADAPTERS)
def test_answers_of_the_base_model_do_not(
    name: str, answers: dict[str, list[str]], checks: dict[str, dict[str, Check]]
) -> None:
    first = next(iter(checks[name].values()))
    assert not any(first(answer, {}) for answer in answers["base"])
