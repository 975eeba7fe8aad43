"""`loraq bench engine | service`."""

import asyncio
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine import EngineConfig, EngineError
from services.bench.affinity.command import affinity
from services.bench.scheduling.command import scheduling
from services.bench.termination import cancelled_by_sigterm, interrupted_by_sigterm
from services.cli.output import Real
from services.errors import ConfigError, InputError
from services.process.settings import load_settings

if TYPE_CHECKING:
    from services.bench.engine.report import EngineReport
    from services.bench.service.report import ServiceReport

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def bench() -> None:
    """Measure performance on this machine."""


bench.add_command(scheduling)
bench.add_command(affinity)


@bench.command()
@click.option("--model", type=DIRECTORY, help="Base model directory [default: LORAQ_BASE_MODEL].")
@click.option(
    "--adapters", type=DIRECTORY, help="Directory of PEFT directories, used by name [default: random adapters]."
)
@click.option("--requests", default=32, show_default=True, type=click.IntRange(1), help="Requests per run.")
@click.option(
    "--distinct", default=0, show_default=True, type=click.IntRange(0), help="Adapters in use; 0: base model only."
)
@click.option(
    "--registered",
    default=0,
    show_default=True,
    type=click.IntRange(0, 100_000),
    help="Adapters to load, with copies if there are fewer; 0: as many as --distinct.",
)
@click.option(
    "--popularity",
    default="cycle",
    show_default=True,
    type=click.Choice(["cycle", "zipf"]),
    help="Use the DISTINCT adapters in turn, or draw from all registered by Zipf's law (exponent 1).",
)
@click.option(
    "--batch", default=0, show_default=True, type=click.IntRange(0), help="Concurrent sequences; 0: all requests."
)
@click.option("--prompt-len", default=64, show_default=True, type=click.IntRange(1), help="Tokens per prompt.")
@click.option(
    "--new-tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens to generate per request."
)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True, help="Where the engine runs.")
@click.option("--threads", default=0, show_default=True, type=click.IntRange(0), help="CPU threads; 0: one per core.")
@click.option(
    "--pool-bytes",
    default=1024**3,
    show_default=True,
    type=click.IntRange(1),
    help="Memory for KV and adapters, bytes.",
)
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1), help="Measured runs; medians are reported."
)
@click.option(
    "--cold/--no-cold",
    default=True,
    show_default=True,
    help="Also measure the first token of an adapter not yet loaded.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def engine(
    model: Path | None,
    adapters: Path | None,
    requests: int,
    distinct: int,
    registered: int,
    popularity: str,
    batch: int,
    prompt_len: int,
    new_tokens: int,
    dtype: str,
    device: str,
    threads: int,
    pool_bytes: int,
    repeats: int,
    cold: bool,
    as_json: bool,
) -> None:
    """Measure the engine: greedy generation for fixed random prompts."""
    from engine.files.model_config import read_model_config
    from services.bench.engine.adapters import adapter_dirs, copies
    from services.bench.engine.run import Workload, run_engine  # torch is slow to import

    count = _registered(registered, distinct, popularity)
    workload = Workload(requests, distinct, prompt_len, new_tokens, repeats, cold, popularity)
    config = EngineConfig(
        model=model or _base_model(),
        device=device,
        dtype=dtype,  # type: ignore[arg-type]  # click has checked the choice
        max_batch_size=min(batch or requests, requests),
        max_batch_tokens=max(2048, batch or requests),
        pool_bytes=pool_bytes,
        threads=threads,
        prefix_cache=False,  # every run sends the same prompts
    )
    try:
        with (
            interrupted_by_sigterm(),
            adapter_dirs(adapters, read_model_config(config.model_dir), count) as originals,
        ):
            if adapters and not registered and len(originals) < distinct:
                raise InputError(f"{adapters} contains {len(originals)} adapters, fewer than --distinct {distinct}")
            with copies(originals, count) as registry:
                report = run_engine(config, workload, registry, sys.stderr)
    except EngineError as error:
        raise InputError(str(error)) from error
    click.echo(json.dumps(asdict(report)) if as_json else _table(report))


@bench.command()
@click.option("--jobs", default=20_000, show_default=True, type=click.IntRange(1, 2_000_000), help="Number of jobs.")
@click.option(
    "--engine",
    "engine_name",
    default="echo",
    show_default=True,
    type=click.Choice(["echo"]),
    help="`echo` replaces only the engine's step.",
)
@click.option("--batch", default=512, show_default=True, type=click.IntRange(1, 1024), help="LORAQ_MAX_BATCH_SIZE.")
@click.option(
    "--backlog", default=6144, show_default=True, type=click.IntRange(1), help="LORAQ_MAX_BACKLOG_JOBS, all lanes."
)
@click.option(
    "--rate",
    type=Real(0, 100_000),
    help="Jobs/s of the latency measurement, 0 to skip it [default: half of the throughput].",
)
@click.option("--peers", is_flag=True, help="Also measure FastStream and a bare loop for comparison.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def service(
    jobs: int, engine_name: str, batch: int, backlog: int, rate: float | None, peers: bool, as_json: bool
) -> None:
    """Measure everything around the engine, with broker and database of the settings, in a temporary pool."""
    from services.bench.service.run import RunOptions, run_service  # `--help` needs no clients

    if peers and find_spec("faststream") is None:
        raise InputError("--peers needs FastStream, which is not installed: in the clone, pip install -e '.[bench]'")
    options = RunOptions(jobs, engine_name, batch, backlog, rate, peers)
    try:
        report = asyncio.run(cancelled_by_sigterm(run_service(load_settings(), options, sys.stderr)))
    except asyncio.CancelledError:
        raise click.Abort from None
    click.echo(json.dumps(asdict(report)) if as_json else _table(report))


def _registered(registered: int, distinct: int, popularity: str) -> int:
    """The number of adapters to load; raises InputError for contradictory options."""
    if popularity == "zipf":
        if distinct or not registered:
            raise InputError("--popularity zipf draws from --registered N adapters: give --registered, not --distinct")
        return registered
    if registered and not 0 < distinct <= registered:
        raise InputError(f"--registered {registered} needs --distinct between 1 and {registered}")
    return registered or distinct


def _base_model() -> Path:
    model = load_settings().base_model
    if model is None:
        raise ConfigError("no base model is given: use --model or set LORAQ_BASE_MODEL")
    return model


def _table(report: "EngineReport | ServiceReport") -> str:
    return "\n".join(f"{name:>24}  {value}" for name, value in asdict(report).items() if value is not None)
