"""The jobs of a simulation: recorded in a file, or drawn. Pure: seeded by its caller."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.common import Lane
from services.errors import InputError
from services.simulate.traces.popularity import draw, zipf_shares
from services.simulate.worker import LANES, Jobs

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

DEFAULT_RANK = 16


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a trace by number. `key` is a record's, `tenant/adapter`; None and rank 0 for the base model."""

    key: Sequence[str | None]
    tenant: Sequence[str]
    rank: Sequence[int]

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of arrival: seconds, adapter and lane by number, tokens of prompt and output."""

    adapters: Adapters
    at_s: Floats
    adapter: Int32
    lane: npt.NDArray[np.int8]
    prompt: Int32
    output: Int32

    def __len__(self) -> int:
        return len(self.at_s)

    def uses(self) -> npt.NDArray[np.int64]:
        """Jobs of each adapter."""
        return np.bincount(self.adapter, minlength=len(self.adapters)).astype(np.int64)

    def of(self, chosen: npt.NDArray[np.int64]) -> Jobs:
        """These jobs, for one worker."""
        numbers = self.adapter[chosen].tolist()
        names = self.adapters
        return Jobs(
            self.at_s[chosen].tolist(),
            [names.key[number] or "" for number in numbers],
            [names.tenant[number] for number in numbers],
            self.lane[chosen].tolist(),
            self.prompt[chosen].tolist(),
            self.output[chosen].tolist(),
        )

    def ranks(self) -> dict[str, int]:
        """Rank by key."""
        return {key: rank for key, rank in zip(self.adapters.key, self.adapters.rank, strict=True) if key is not None}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, log-normal around a median; `spread` is the deviation of their logarithm, 0 for one length."""

    median: int
    spread: float = 0.0

    def draw(self, size: int, rng: np.random.Generator) -> Int32:
        """At least one token each."""
        if not self.spread:
            return np.full(size, self.median, np.int32)
        drawn = self.median * np.exp(self.spread * rng.standard_normal(size, dtype=np.float32))
        lengths: Int32 = np.maximum(1, np.rint(drawn)).astype(np.int32)
        return lengths


@dataclass(frozen=True, slots=True)
class Bursts:
    """Arrivals come `factor` times as fast in bursts as between them; both last `mean_s` on average."""

    factor: float = 1.0
    mean_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A drawn trace. `rate_per_s` 0: all jobs are there at the beginning. `lanes` are shares."""

    num_jobs: int
    num_adapters: int
    num_tenants: int = 1
    exponent: float = 1.0
    rate_per_s: float = 0.0
    bursts: Bursts = Bursts()
    ranks: tuple[int, ...] = (DEFAULT_RANK,)
    lanes: Mapping[Lane, float] | None = None
    prompt: Lengths = Lengths(500)
    output: Lengths = Lengths(150)

    def draw(self, seed: int) -> Trace:
        """The trace of this seed; adapter k has popularity rank k and belongs to tenant k modulo their number."""
        rng = np.random.default_rng(seed)
        count, tenants = self.num_adapters, self.num_tenants
        tenant = [f"tenant-{number % tenants}" for number in range(count)]
        adapters = Adapters(
            [f"{tenant[number]}/adapter-{number}" for number in range(count)],
            tenant,
            [self.ranks[number % len(self.ranks)] for number in range(count)],
        )
        shares = self.lanes or {Lane.STANDARD: 1.0}
        lane_shares = np.array([shares.get(lane, 0.0) for lane in LANES])
        return Trace(
            adapters,
            self._arrivals(rng),
            draw(zipf_shares(count, self.exponent), self.num_jobs, rng).astype(np.int32),
            draw(lane_shares / lane_shares.sum(), self.num_jobs, rng).astype(np.int8),
            self.prompt.draw(self.num_jobs, rng),
            self.output.draw(self.num_jobs, rng),
        )

    def _arrivals(self, rng: np.random.Generator) -> Floats:
        """A Poisson process whose rate switches between two values, `rate_per_s` on average."""
        if not self.rate_per_s:
            return np.zeros(self.num_jobs)
        work = np.cumsum(rng.standard_exponential(self.num_jobs)) / self.rate_per_s
        if self.bursts.factor == 1.0:
            return work
        slow, fast = 2 / (1 + self.bursts.factor), 2 * self.bursts.factor / (1 + self.bursts.factor)
        num_periods = 2 * (8 + int(4 * work[-1] / self.bursts.mean_s))
        lengths = rng.standard_exponential(num_periods) * self.bursts.mean_s
        rates = np.where(np.arange(num_periods) % 2, fast, slow)
        ends = np.concatenate(([0.0], np.cumsum(lengths)))
        done = np.concatenate(([0.0], np.cumsum(lengths * rates)))
        assert done[-1] >= work[-1], "the periods cover all arrivals"
        arrivals: Floats = np.interp(work, done, ends)
        return arrivals


def read_trace(path: Path, default_rank: int = DEFAULT_RANK) -> Trace:
    """A trace from JSON lines with `at_s`, `tenant`, `adapter` (null: base model), `lane`, `prompt_tokens`,
    `completion_tokens` and, of the adapter, `rank`.

    Raises InputError that names the line which is no such job.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_parsed(line, f"{path}, line {number}"))
    return from_rows(rows, str(path), default_rank)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        float(row["at_s"]), str(row["tenant"]), Lane(row.get("lane", Lane.STANDARD))
        if int(row["prompt_tokens"]) < 1 or int(row["completion_tokens"]) < 1 or int(row.get("rank") or 1) < 1:
            raise ValueError("tokens and ranks are at least 1")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{where} is not a job with at_s, tenant, adapter, lane, prompt_tokens and completion_tokens: {error}"
        ) from error
    return dict(row)


def from_rows(rows: Iterable[Mapping[str, Any]], source: str, default_rank: int = DEFAULT_RANK) -> Trace:
    """A trace of rows as `read_trace` reads them, in any order. Raises InputError if there are none."""
    ordered = sorted(rows, key=lambda row: float(row["at_s"]))
    if not ordered:
        raise InputError(f"{source} holds no job; record some, or leave out --trace to draw them")
    numbers: dict[str | None, int] = {}
    tenants: list[str] = []
    ranks: list[int] = []
    chosen = []
    for row in ordered:
        adapter = row.get("adapter")
        key = None if adapter is None else f"{row['tenant']}/{adapter}"
        if key not in numbers:
            numbers[key] = len(numbers)
            tenants.append(str(row["tenant"]))
            ranks.append(0 if key is None else int(row.get("rank") or default_rank))
        chosen.append(numbers[key])
    begin = float(ordered[0]["at_s"])
    return Trace(
        Adapters(list(numbers), tenants, ranks),
        np.array([float(row["at_s"]) - begin for row in ordered]),
        np.array(chosen, np.int32),
        np.array([LANES.index(Lane(row.get("lane", Lane.STANDARD))) for row in ordered], np.int8),
        _column(ordered, lambda row: row["prompt_tokens"]),
        _column(ordered, lambda row: row["completion_tokens"]),
    )


def _column(rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]) -> Int32:
    return np.array([int(value(row)) for row in rows], np.int32)


def lines_of(trace: Trace) -> Iterable[str]:
    """The trace as JSON lines that `read_trace` reads."""
    names = trace.adapters
    for index in range(len(trace)):
        number = int(trace.adapter[index])
        key = names.key[number]
        yield json.dumps(
            {
                "at_s": round(float(trace.at_s[index]), 6),
                "tenant": names.tenant[number],
                "adapter": None if key is None else key.partition("/")[2],
                "lane": LANES[trace.lane[index]],
                "prompt_tokens": int(trace.prompt[index]),
                "completion_tokens": int(trace.output[index]),
                "rank": names.rank[number] or None,
            }
        )
