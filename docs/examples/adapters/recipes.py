"""The training recipe of each adapter, and its rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

ATTENTION_READS = ("q_proj", "v_proj")
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained. `alpha` scales its delta by alpha / rank; `max_tokens` bounds an answer."""

    name: str
    rank: int
    targets: tuple[str, ...]
    epochs: int
    learning_rate: float
    max_tokens: int
    seed: int = 7

    @property
    def alpha(self) -> int:
        """Twice the rank, so that ranks share a learning rate."""
        return 2 * self.rank

    @property
    def path(self) -> Path:
        """Directory of the trained adapter."""
        return HERE / self.name

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of `train` or `heldout`: a prompt, and an answer if there is a correct one."""
        lines = (HERE / "data" / f"{self.name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for row in map(json.loads, lines) if row["split"] == split]


# The larger ranks use only two projections, because every file must be below 5 MB.
RECIPES = (
    Recipe("brief", rank=4, targets=ALL_PROJECTIONS, epochs=4, learning_rate=1e-3, max_tokens=40),
    Recipe("pirate", rank=8, targets=ALL_PROJECTIONS, epochs=5, learning_rate=1e-3, max_tokens=64),
    Recipe("json", rank=16, targets=ATTENTION_READS, epochs=5, learning_rate=2e-3, max_tokens=80),
    Recipe("triage", rank=32, targets=ATTENTION_READS, epochs=6, learning_rate=1e-3, max_tokens=8),
)
