"""`loraq simulate`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schemas.common import Lane
from services.cli.output import Real, on_database, print_json, print_rows, when
from services.errors import InputError
from services.process.settings import load_settings
from services.simulate.engines.hardware import GPUS, MODELS

if TYPE_CHECKING:
    from services.simulate.fleet import Report
    from services.simulate.traces.trace import Trace

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COLUMNS = (
    *("policy", "tokens_per_s", "busy", "busiest", "rows_per_step", "adapters_per_step", "loads", "gb_loaded"),
    *("hit_rate", "cold_p99_s"),
)
LANE_COLUMNS = ("policy", "lane", "jobs", "wait_p50_s", "wait_p99_s", "total_p50_s", "total_p99_s", "passed_tokens")
COMPARED = ("run", "round", "policy", "measure", "real", "simulated", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """The options that describe the fleet and the output; the others are those of TraceOptions and EngineOptions."""

    workers: int
    partitions: int
    spread: int
    routing: str
    policies: tuple[str, ...]
    detail: str
    validate: tuple[Path, ...]
    seed: int
    processes: int
    save_trace: Path | None
    plot: Path | None
    as_json: bool


def _lanes(_context: click.Context, _parameter: click.Parameter, value: str) -> dict[Lane, float]:
    try:
        pairs = [part.split("=") for part in value.split(",")]
        shares = {Lane(name.strip()): float(share) for name, share in pairs}
        if min(shares.values()) < 0 or not 0 < sum(shares.values()) < float("inf"):
            raise ValueError("shares are at least 0, and one is above 0")
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not like interactive=1,standard=8,batch=1: {error}") from error
    return shares


def _ranks(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in value.split(","))
        if min(ranks) < 1 or max(ranks) > 512:
            raise ValueError("ranks are from 1 to 512")
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of ranks like 8,16,64: {error}") from error
    return ranks


def _policies(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in ("first-come", "unbounded", "loraq") and not name.isdecimal():
            raise click.BadParameter(f"{name!r} is neither first-come, unbounded, loraq nor a bound in tokens")
    return value


TRACE = [
    click.option("--trace", type=FILE, help="Recorded jobs, JSON lines [default: draw them]."),
    click.option("--since", type=when, help="Jobs that the database has from then on, of LORAQ_POOL, instead."),
    click.option("--jobs", default=10_000, show_default=True, type=click.IntRange(1, 50_000_000), help="Drawn jobs."),
    click.option("--adapters", default=500, show_default=True, type=click.IntRange(1, 1_000_000), help="Adapters."),
    click.option("--tenants", default=20, show_default=True, type=click.IntRange(1, 100_000), help="Tenants."),
    click.option("--zipf", default=1.0, show_default=True, type=Real(0, 5), help="Exponent of the popularity."),
    click.option("--rate", default=0.0, show_default=True, type=Real(0, 1e7), help="Jobs/s; 0 is all at once."),
    click.option(
        "--burst",
        nargs=2,
        default=(1.0, 60.0),
        show_default=True,
        type=Real(0.01, 1e6),
        metavar="FACTOR SECONDS",
        help="Rate in bursts relative to that between them, and the mean length of both.",
    ),
    click.option("--ranks", default="16", show_default=True, callback=_ranks, help="Adapters take turns among them."),
    click.option("--lanes", default="standard=1", show_default=True, callback=_lanes, help="Shares of the lanes."),
    click.option(
        "--prompt",
        nargs=2,
        default=(500, 0.0),
        show_default=True,
        type=(click.IntRange(1), Real(0, 3)),
        metavar="TOKENS SPREAD",
        help="Median, and deviation of the logarithm.",
    ),
    click.option(
        "--output",
        nargs=2,
        default=(150, 0.0),
        show_default=True,
        type=(click.IntRange(1), Real(0, 3)),
        metavar="TOKENS SPREAD",
        help="Median, and deviation of the logarithm.",
    ),
]
ENGINE = [
    click.option("--gpu", default="h200", show_default=True, type=click.Choice(list(GPUS)), help="Modelled GPU."),
    click.option(
        "--model", default="llama-8b", show_default=True, type=click.Choice(list(MODELS)), help="Shape of the model."
    ),
    click.option(
        "--calibrate",
        multiple=True,
        type=FILE,
        help="Costs fitted to what `loraq bench scheduling --json` or several `loraq bench engine --json` printed, with"
        " SmolLM2's shape unless --model names another; takes the place of --gpu.",
    ),
    click.option("--batch", default=64, show_default=True, type=click.IntRange(1, 4096), help="LORAQ_MAX_BATCH_SIZE."),
    click.option(
        "--batch-tokens", default=2048, show_default=True, type=click.IntRange(1), help="LORAQ_MAX_BATCH_TOKENS."
    ),
    click.option("--pool-gb", type=Real(0, 1e5), help="LORAQ_POOL_BYTES [default: the GPU's memory less weights]."),
    click.option("--window", default=512, show_default=True, type=click.IntRange(3), help="LORAQ_MAX_BACKLOG_JOBS."),
    click.option("--host-gb", default=64.0, show_default=True, type=Real(0, 1e5), help="LORAQ_HOST_BYTES."),
    click.option("--disk-gb", default=500.0, show_default=True, type=Real(0, 1e6), help="LORAQ_DISK_CACHE_BYTES."),
    click.option("--disk-rate", default=3e9, show_default=True, type=Real(1, 1e12), help="Bytes/s read from disk."),
    click.option(
        "--store",
        nargs=2,
        default=(0.03, 1.25e9),
        show_default=True,
        type=(Real(0, 60), Real(1, 1e12)),
        metavar="SECONDS BYTES/S",
        help="Latency of the store, and bandwidth of each worker's link to it.",
    ),
    click.option("--store-total", type=Real(1, 1e15), help="Bytes/s of the store, shared equally by the workers."),
    click.option("--known-gb", default=256.0, show_default=True, type=Real(0, 1e6), help="LORAQ_HOST_CACHE_BYTES."),
]
FLEET = [
    click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 10_000), help="Workers."),
    click.option("--partitions", default=8, show_default=True, type=click.IntRange(1, 1000), help="For each worker."),
    click.option(
        "--spread", default=1, show_default=True, type=click.IntRange(1, 10_000), help="Partitions of a hot adapter."
    ),
    click.option(
        "--routing",
        default="affine",
        show_default=True,
        type=click.Choice(["affine", "random"]),
        help="By tenant/adapter, or to any worker.",
    ),
    click.option(
        "--policy",
        "policies",
        multiple=True,
        default=("first-come", "loraq", "unbounded"),
        show_default=True,
        callback=_policies,
        help="first-come, loraq (the default bounds), unbounded, or a bound in tokens for every lane.",
    ),
    click.option(
        "--detail",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "steps", "aggregated"]),
        help="Plan every step with the engine's scheduler, or go from one completion to the next.",
    ),
    click.option("--validate", multiple=True, type=FILE, help="Compare with this run of `loraq bench scheduling`."),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the trace and the routing."),
    click.option("--processes", default=0, show_default=True, type=click.IntRange(0), help="0 is one per core."),
    click.option("--save-trace", type=click.Path(path_type=Path, dir_okay=False), help="Write the trace and stop."),
    click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Directory for charts."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON lines on stdout."),
]


def _with(options: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@_with([*TRACE, *ENGINE, *FLEET])
def simulate(**given: Any) -> None:
    """Serve a trace in simulated time, with the worker's own queue policy, under several policies in turn.

    docs/simulator.md explains the model and how far it can be trusted.
    """
    from services.simulate.options import EngineOptions, TraceOptions  # the engine is slow to import

    options = _picked(Options, given)
    if options.validate:
        _validate(given["calibrate"], options)
        return
    traces, engines = _picked(TraceOptions, given), _picked(EngineOptions, given)
    trace = _recorded(traces.since, traces.jobs) if traces.since is not None else traces.drawn(options.seed)
    if options.save_trace is not None:
        _save(trace, options.save_trace)
        return
    reports = _reports(trace, engines, options)
    if options.plot is not None:
        from services.simulate.plots import draw_reports

        for path in draw_reports(reports, options.plot):
            click.echo(f"wrote {path}", err=True)
    _print(reports, as_json=options.as_json)


def _picked(kind: Any, given: Mapping[str, Any]) -> Any:
    return kind(**{each.name: given[each.name] for each in fields(kind)})


def _recorded(since: datetime, limit: int) -> "Trace":
    from services.simulate.traces.recorded import recorded_trace

    settings = load_settings()
    return on_database(lambda connection: recorded_trace(connection, settings.pool, since, limit), settings)


def _save(trace: "Trace", path: Path) -> None:
    from services.simulate.traces.trace import lines_of

    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines_of(trace))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def _reports(trace: "Trace", engines: Any, options: Options) -> list["Report"]:
    from services.simulate.fleet import is_aggregated
    from services.simulate.fleet import simulate as serve
    from services.simulate.options import check_fits
    from services.simulate.policies import policy_of
    from services.simulate.traces.routing import Fleet

    aggregated = is_aggregated(trace) if options.detail == "auto" else options.detail == "aggregated"
    model = engines.worker(options.workers, is_aggregated=aggregated)
    check_fits(trace, model)
    fleet = Fleet(options.workers, options.partitions, options.spread, options.routing == "affine")
    reports = []
    for name in options.policies:
        reports.append(serve(trace, fleet, model, policy_of(name), options.seed, options.processes or None))
        click.echo(f"{name}: simulated {reports[-1].seconds:g} s", err=True)
    return reports


def _print(reports: Sequence["Report"], *, as_json: bool) -> None:
    if as_json:
        for report in reports:
            print_json(report)
        return
    click.echo(f"{reports[0].jobs} jobs, {reports[0].model}")
    print_rows([asdict(report) for report in reports], COLUMNS, "no policy")
    lanes = [
        {"policy": report.policy, "lane": lane, **asdict(each)}
        for report in reports
        for lane, each in report.lanes.items()
    ]
    click.echo()
    print_rows(lanes, LANE_COLUMNS, "no job")


def _validate(calibrated: tuple[Path, ...], options: Options) -> None:
    from services.simulate.measured import calibrate, read_run
    from services.simulate.validation import compare

    if not calibrated:
        raise InputError("--validate needs --calibrate with another run of `loraq bench scheduling --json`")
    if set(calibrated) & set(options.validate):
        raise InputError("a run that calibrates cannot validate; measure another one with another --seed")
    costs = calibrate(calibrated)
    rows = [asdict(each) for path in options.validate for each in compare(read_run(path), costs)]
    if options.as_json:
        print_json({"costs": asdict(costs), "comparisons": rows})
    else:
        click.echo(f"costs: {asdict(costs)}", err=True)
        print_rows([row | {"off": f"{row['off']:+.1%}"} for row in rows], COMPARED, "no run")
