"""`loraq bench affinity`."""

import asyncio
import json
import sys
from dataclasses import asdict

import click

from services.bench.termination import cancelled_by_sigterm
from services.cli.output import Real
from services.process.settings import load_settings


@click.command()
@click.option("--jobs", default=20_000, show_default=True, type=click.IntRange(1, 1_000_000), help="Jobs per route.")
@click.option("--adapters", default=500, show_default=True, type=click.IntRange(1, 100_000), help="Distinct adapters.")
@click.option(
    "--room", default=200, show_default=True, type=click.IntRange(1, 4096), help="Adapters in a worker's memory."
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 16), help="Workers at the start.")
@click.option("--rate", default=250.0, show_default=True, type=Real(1, 100_000), help="Jobs sent per second.")
@click.option("--exponent", default=1.0, show_default=True, type=Real(0, 10), help="Of Zipf's law.")
@click.option(
    "--churn-jobs",
    default=15_000,
    show_default=True,
    type=click.IntRange(0, 1_000_000),
    help="Further jobs by key, while a worker joins and one is killed; 0 leaves that out.",
)
@click.option("--wanted", default=0.9, show_default=True, type=Real(0, 1), help="Warm share that ends a recovery.")
@click.option(
    "--window", default=500, show_default=True, type=click.IntRange(1), help="Jobs of which that is the share."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the adapters that jobs name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def affinity(as_json: bool, **options: int | float) -> None:
    """Share of jobs whose adapter is in their worker's memory: by key, at random, and while workers come and go."""
    from services.bench.affinity.run import RunOptions, run_affinity  # `--help` needs no clients

    chosen = RunOptions(**options)  # type: ignore[arg-type]  # click has checked the types
    try:
        report = asyncio.run(cancelled_by_sigterm(run_affinity(load_settings(), chosen, sys.stderr)))
    except asyncio.CancelledError:
        raise click.Abort from None
    fields = asdict(report)
    click.echo(json.dumps(fields) if as_json else json.dumps(fields, indent=2))
