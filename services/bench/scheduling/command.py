"""The command `loraq bench scheduling`."""

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine import EngineConfig, EngineError
from services.bench.termination import interrupted_by_sigterm
from services.errors import ConfigError, InputError
from services.process.settings import load_settings

if TYPE_CHECKING:
    from engine.files.model_config import ModelConfig

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options by name."""

    model: Path | None
    adapters: int
    jobs: int
    window: int
    pool_bytes: int
    batch: int
    prompt_len: int
    new_tokens: int
    bound: tuple[int, ...]
    repeats: int
    seed: int
    store: tuple[float, float] | None
    as_json: bool


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="[LORAQ_BASE_MODEL]")
@click.option("--adapters", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Random adapters.")
@click.option("--jobs", default=300, show_default=True, type=click.IntRange(1), help="Jobs; adapters by Zipf's law.")
@click.option("--window", default=512, show_default=True, type=click.IntRange(1), help="LORAQ_MAX_BACKLOG_JOBS.")
@click.option(
    "--pool-bytes", default=300 * MIB, show_default=True, type=click.IntRange(1), help="KV and adapter memory."
)
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="LORAQ_MAX_BATCH_SIZE.")
@click.option("--prompt-len", default=64, show_default=True, type=click.IntRange(1), help="Tokens per prompt.")
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens generated per job.")
@click.option(
    "--bound",
    multiple=True,
    default=(4000, 24000),
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of later arrivals that may overtake a job; each is compared with first come, first served.",
)
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the first round's queue.")
@click.option(
    "--store",
    nargs=2,
    type=float,
    metavar="SECONDS BYTES/S",
    help="Simulate a remote store with this latency and bandwidth: every load crosses it first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def scheduling(**given: object) -> None:
    """Compare the worker's policy under several bounds on overtaking with first come, first served."""
    from engine.files.model_config import read_model_config
    from services.bench.engine.adapters import adapter_dirs, copies  # torch is slow to import
    from services.bench.scheduling.run import Policy, Queue, measure, open_engine, ratios
    from services.bench.scheduling.slow_store import Throttle

    options = Options(**given)  # type: ignore[arg-type]  # click has checked them
    model = options.model or load_settings().base_model
    if model is None:
        raise ConfigError("no base model: give --model or set LORAQ_BASE_MODEL")
    config = EngineConfig(model=model, max_batch_size=options.batch, pool_bytes=options.pool_bytes)
    queue = Queue(options.jobs, options.window, options.prompt_len, options.new_tokens)
    policies = [Policy("first come", 0), *(Policy(f"bound {bound}", bound) for bound in options.bound)]
    throttle = Throttle(*options.store) if options.store else None
    try:
        with (
            interrupted_by_sigterm(),
            adapter_dirs(None, read_model_config(config.model_dir), options.adapters) as originals,
            copies(originals, options.adapters) as registry,
        ):
            engine, reader = open_engine(config, registry, throttle)
            ranks = [engine.adapters[str(number)].rank for number in range(options.adapters)]
            seeds = range(options.seed, options.seed + options.repeats)
            try:
                rounds = measure(engine, reader, queue, policies, seeds, sys.stderr)
            finally:
                engine.close()
    except EngineError as error:
        raise InputError(str(error)) from error
    report = {
        **{each.name: getattr(options, each.name) for each in fields(options) if each.name not in ("model", "as_json")},
        "model": _shape(engine.model_config),
        "ranks": ranks,
        "rounds": [[asdict(served) for served in each] for each in rounds],
        "ratios": ratios(rounds),
    }
    click.echo(json.dumps(report) if options.as_json else _table(report["ratios"]))


def _shape(model: "ModelConfig") -> dict[str, int | bool]:
    """The dimensions that determine the sizes of weights, keys, values and adapters."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "q_size": model.q_size,
        "kv_size": model.kv_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _table(ratios: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(ratios.values())))
    head = f"{'vs. first come':<20}" + "".join(f"{name:>20}" for name in names)
    rows = [f"{policy:<20}" + "".join(f"{each[name]:>20.3f}" for name in names) for policy, each in ratios.items()]
    return "\n".join([head, *rows])
