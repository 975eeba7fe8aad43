"""What an engine model is built from, and what it counts. Pure."""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from engine import StepStats
from services.simulate.engines.costs import StepCosts
from services.simulate.engines.hardware import ModelShape, PageSizes
from services.simulate.engines.tiers import Tiers


class SimulatedJob:
    """A job of a simulated worker; `group` is its adapter's name, empty for the base model."""

    __slots__ = ("finished_at", "group", "handed_at", "index", "lane", "num_pages", "output", "prompt", "was_cold")

    def __init__(self, index: int, group: str, lane: int, prompt: int, output: int, num_pages: int) -> None:
        self.index = index
        self.group = group
        self.lane = lane
        self.prompt = prompt
        self.output = output
        self.num_pages = num_pages
        self.handed_at = 0.0
        self.finished_at = 0.0
        self.was_cold = False


@dataclass(frozen=True)
class EngineModel:
    """An engine's limits and costs. `num_pages` is the pool's, shared by KV and adapters."""

    shape: ModelShape
    costs: StepCosts
    num_pages: int
    batch: int = 32
    batch_tokens: int = 2048

    @cached_property
    def pages(self) -> PageSizes:
        """Sizes of the pool's pages."""
        return self.shape.pages()

    @cached_property
    def capacity(self) -> int:
        """Jobs that a worker hands over: a batch and a quarter, as services/worker does."""
        return self.batch + max(1, self.batch // 4)


@dataclass(slots=True)
class Counts:
    """What the steps of one engine computed, as in StepStats."""

    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_only_s: float = 0.0
    decode_only_tokens: int = 0
    adapters: int = 0
    adapter_bytes: float = 0.0
    loads: int = 0
    load_bytes: float = 0.0

    def stats(self) -> StepStats:
        """As the engine reports them."""
        return StepStats(
            self.steps,
            self.busy_s,
            self.prefill_tokens,
            self.decode_tokens,
            self.decode_only_s,
            self.decode_only_tokens,
            self.adapters,
            round(self.adapter_bytes),
        )


class SimulatedEngine(Protocol):
    """The part of an engine that a worker uses, in simulated time. `running` counts its jobs by group."""

    counts: Counts
    running: dict[str, int]
    tiers: Tiers

    def __len__(self) -> int:
        """Jobs inside."""

    def resident(self) -> Set[str]:
        """Adapters that have pages, including those that are being loaded."""

    def expect(self, adapters: Iterable[str]) -> None:
        """Adapters that the worker's queue wants, the one needed first first."""

    def add(self, job: SimulatedJob) -> None:
        """Take a job over from the worker."""

    def advance(self, now: float, until: float) -> tuple[float, list[SimulatedJob]]:
        """Compute until jobs finish or `until` is reached; returns the time and the finished jobs.

        The time passes `until` by less than a step.
        """
