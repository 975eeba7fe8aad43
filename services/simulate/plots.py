"""Bar charts of compared policies. Needs the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.errors import InputError
from services.simulate.fleet import Report

CHARTS = {
    "throughput": ("tokens_per_s", "output tokens/s"),
    "loads": ("loads", "adapter loads"),
    "adapters-per-step": ("adapters_per_step", "distinct adapters in a step"),
    "hit-rate": ("hit_rate", "jobs whose adapter was on the device"),
}


def pyplot() -> Any:
    """Matplotlib without a display. Raises InputError if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError("--plot needs matplotlib; in the clone: pip install -e '.[plots]'") from error
    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt


def draw_reports(reports: Sequence[Report], directory: Path) -> list[Path]:
    """A chart for each measure, and one of waits by lane; returns the files."""
    plt = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    names = [report.policy for report in reports]
    paths = []
    for name, (field, label) in CHARTS.items():
        figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
        axes.bar(names, [getattr(report, field) for report in reports])
        axes.set_ylabel(label)
        paths.append(_saved(plt, figure, directory / f"{name}.png"))
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for index, lane in enumerate(reports[0].lanes):
        places = [position + index * 0.25 for position in range(len(reports))]
        axes.bar(places, [report.lanes[lane].total_p99_s for report in reports], 0.22, label=lane)
    axes.set_xticks([position + 0.125 * (len(reports[0].lanes) - 1) for position in range(len(reports))], names)
    axes.set_ylabel("seconds from arrival to end, p99")
    axes.legend()
    return [*paths, _saved(plt, figure, directory / "latency.png")]


def _saved(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
