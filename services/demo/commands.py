"""`loraq demo`."""

import os
import sys
from pathlib import Path

import click

from services.process.settings import default_cache_dir

DEFAULT_DIR = Path(".loraq/demo")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "adapters"


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIR,
    show_default=True,
    help="Directory of the demo's data, logs and settings.",
)
@click.option(
    "--jobs", "num_jobs", type=click.IntRange(1, 10_000), default=30, show_default=True, help="Jobs to produce."
)
@click.option(
    "--base-model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Hugging Face directory of a Llama-family model instead of SmolLM2; adapters that do not fit are left out.",
)
@click.option(
    "--adapters",
    "adapters_dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=EXAMPLES,
    help="Directory of PEFT directories; by default the example adapters of the source tree.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="LORAQ_CACHE_DIR",
    default=default_cache_dir,
    show_default="~/.cache/loraq",
    help="Directory for the converted base model.",
)
@click.option("--keep", is_flag=True, help="Keep everything running at the end, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; other output goes to stderr.")
def demo(
    directory: Path,
    num_jobs: int,
    base_model: Path | None,
    adapters_dir: Path,
    cache_dir: Path,
    keep: bool,
    as_json: bool,
) -> None:
    """Run the whole product on this machine, with real servers, a real model and real adapters.

    Starts a Kafka-compatible broker, PostgreSQL and an S3-compatible store, pushes LoRA adapters of two tenants, sends
    jobs for them through Kafka, and checks that every job ends as one row in Postgres and one signed webhook. Stops
    everything that it started. Ignores settings in the environment and in env files.
    """
    for name in [name for name in os.environ if name.startswith("LORAQ_")]:
        del os.environ[name]
    from services.demo.run import Options, run_demo  # slow to import; `loraq demo --help` does not need it

    options = Options(directory, num_jobs, base_model, adapters_dir, cache_dir, keep, as_json)
    sys.exit(run_demo(options))
