"""The demo's plan, made before anything runs: each tenant's adapters, and the jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from engine import AdapterError, check_adapter
from schemas.common import Lane
from schemas.job import ChatMessage, JobRequest, Sampling, WebhookTarget
from services.errors import ConfigError

TENANTS = ("acme", "globex")
MAX_TOKENS = 80
PROMPTS = (
    "My parcel has not arrived yet. What should I do?",
    "What is the capital of Italy?",
    "The app closes by itself all the time.",
    "Why did you charge me twice?",
    "How do I cook pasta?",
    "I cannot remember my password.",
    "Tell me something about the sea.",
    "What is electricity?",
    "Where do lions live?",
    "Is it better to walk or to run?",
    "How can I learn to play the guitar?",
    "Do you have job openings?",
)

JobKey = tuple[str, UUID]
"""Tenant and job_id: what identifies a job."""


@dataclass(frozen=True)
class Adapter:
    """A PEFT directory and the tenant that pushes it."""

    tenant: str
    name: str
    directory: Path


@dataclass(frozen=True)
class Job:
    """One job of the demo. `adapter` is None for the base model."""

    job_id: UUID
    tenant: str
    adapter: str | None
    prompt: str
    lane: Lane
    run: str

    @property
    def key(self) -> JobKey:
        """Tenant and job_id."""
        return self.tenant, self.job_id

    def request(self, webhook_url: str) -> JobRequest:
        """The record's value; uses greedy decoding, so that the same job has the same answer in every run."""
        return JobRequest(
            job_id=self.job_id,
            tenant=self.tenant,
            adapter=self.adapter,
            messages=[ChatMessage(role="user", content=self.prompt)],
            sampling=Sampling(max_tokens=MAX_TOKENS),
            webhook=WebhookTarget.model_validate_json(f'{{"url": "{webhook_url}"}}'),
            metadata={"demo": self.run, "prompt": self.prompt},
        )


def find_adapters(directory: Path, base_model: Path) -> tuple[list[Adapter], list[str]]:
    """Adapters below `directory` that fit the base, distributed over the tenants; then a sentence for each of the rest.

    Raises ConfigError if the directory is missing.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} does not exist; name the directory of the adapters with --adapters DIR")
    fitting, remarks = [], []
    for path in sorted(path.parent for path in directory.glob("*/adapter_config.json")):
        try:
            check_adapter(path, base_model)
        except AdapterError as error:
            remarks.append(f"{path.name} does not fit the base model and is left out: {error}")
        else:
            fitting.append(path)
    return [Adapter(TENANTS[i % len(TENANTS)], path.name, path) for i, path in enumerate(fitting)], remarks


def plan_jobs(adapters: Sequence[Adapter], count: int, run: str) -> list[Job]:
    """`count` jobs: every prompt goes to the base and to every adapter before the next prompt.

    Lanes alternate by prompt and adapter, so that each adapter has jobs in all lanes. `run` marks the jobs of this run.
    """
    targets: list[tuple[str, str | None]] = [(TENANTS[0], None), *((a.tenant, a.name) for a in adapters)]
    lanes = tuple(Lane)
    jobs = []
    for number in range(count):
        round_, place = divmod(number, len(targets))
        tenant, adapter = targets[place]
        # The tenant of the base model's job alternates from prompt to prompt.
        tenant = tenant if adapter else TENANTS[round_ % len(TENANTS)]
        lane = lanes[(round_ + place) % len(lanes)]
        jobs.append(Job(uuid4(), tenant, adapter, PROMPTS[round_ % len(PROMPTS)], lane, run))
    return jobs
