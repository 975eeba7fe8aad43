"""The engine: add and cancel requests between steps; each step computes a batch and samples from it."""

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from engine.backend import Backend, open_backend, torch_dtype
from engine.batch import build_batch
from engine.config import EngineConfig
from engine.errors import (
    AdapterInUseError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownAdapterError,
)
from engine.lora.reading import Reader, ThreadReader
from engine.lora.store import AdapterStore, LoadedAdapter
from engine.lora.tables import SlotTables
from engine.lora.transfer import DirectLoader, Loader, StagedLoader
from engine.memory.host import HostTier
from engine.memory.pool import PagePool
from engine.memory.prefix import scope_key
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.model.config import read_model_config
from engine.model.decoder import Decoder
from engine.model.text import TextStream
from engine.model.tokenizer import Tokenizer
from engine.model.weights import Stored, load_weights, stored_tensors
from engine.model.workspace import Workspace
from engine.runner import make_runner
from engine.sampling import Sampled
from engine.scheduler import Scheduler, Slice
from engine.sequence import Sequence as Running
from engine.types import AdapterInfo, AdapterName, AdapterTraffic, FinishReason, Output, Request, RequestId, Usage

LONGEST_WAIT_S = 0.02
"""Of a step that has nothing to compute, for an adapter on its way."""


@dataclass(slots=True, eq=False)
class _Job:
    """What the engine keeps of a request beside its tokens."""

    sequence: Running
    text: TextStream
    added_at: float
    first_token_s: float | None = None
    logprobs: list[dict[int, float]] | None = None


class Engine:
    """One base model and its loaded adapters. Not thread-safe: one thread adds, cancels and steps.

    Raises ModelError when the model's directory cannot be served and ConfigurationError when memory is too small or the
    device is not there. `backend` takes the place of the one that the configuration's device asks for, `reader` that of
    threads which read adapters beside the steps, `weights` that of the tensors in the model's directory.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend | None = None,
        reader: Reader | None = None,
        weights: Mapping[str, Stored] | None = None,
    ) -> None:
        self.config = config
        self.model_config = read_model_config(config.model_dir)
        torch.set_num_threads(config.num_threads)
        self._backend = backend or open_backend(config)
        dtype = torch_dtype(config)
        self.tokenizer = Tokenizer(config.model_dir)
        eos = self.tokenizer.eos_token_id
        self._eos_token_ids = self.model_config.eos_token_ids | ({eos} if eos is not None else set())
        device = self._backend.device
        self._storage = Storage(self.model_config, dtype, config.tokens_per_page, config.pool_bytes, device)
        self._pool = PagePool(self._storage.num_pages)
        self._residency = Residency(self._pool)
        self._adapters = self._make_store(reader or ThreadReader())
        self._decoder = self._make_decoder(dtype, weights or stored_tensors(config.model_dir))
        self._runner = make_runner(config, self._backend, self._decoder, self._adapters.tables, self._storage)
        self._scheduler = Scheduler(
            self._pool,
            self._residency,
            self._storage.tokens_per_page,
            config.max_batch_size,
            config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._instance = secrets.token_bytes(16)
        self._jobs: dict[RequestId, _Job] = {}
        self._unclaimed: list[Output] = []
        self._numbers = itertools.count()

    def _make_store(self, reader: Reader) -> AdapterStore:
        storage, backend = self._storage, self._backend
        tables = SlotTables(storage, is_remote=backend.is_remote)
        loader: Loader = DirectLoader(reader, storage)
        if backend.is_remote:
            host = HostTier(storage, backend.device, self.config.host_bytes)
            loader = StagedLoader(backend.device, reader, storage, host)
        return AdapterStore(self.model_config, storage, self._pool, self._residency, tables, loader)

    def _make_decoder(self, dtype: torch.dtype, stored: Mapping[str, Stored]) -> Decoder:
        model, config = self.model_config, self.config
        kernels, where = self._backend.kernels, self._backend.device.where
        weights = load_weights(stored, model, dtype, kernels, where)
        workspace = Workspace(model, dtype, config.max_batch_tokens, config.max_batch_size, where)
        return Decoder(model, weights, kernels, self._storage, self._adapters.tables, workspace)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The loaded adapters by name."""
        return MappingProxyType({str(name): adapter.info for name, adapter in self._adapters.items()})

    @property
    def adapter_traffic(self) -> AdapterTraffic:
        """What adapters have cost so far: each load is a read of files, and its bytes are those of its pages."""
        residency, page = self._residency, self._storage.bytes_per_page_id
        pages_in, pages_out = residency.adapter_pages_in, residency.adapter_pages_out
        return AdapterTraffic(residency.num_adapter_loads, pages_in * page, pages_out * page)

    @property
    def has_work(self) -> bool:
        """True while a step would do something, or wait for an adapter that a request needs."""
        return bool(self._jobs or self._unclaimed)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens of unfinished requests that no step has computed yet."""
        return sum(
            max(len(sequence.prompt_ids) - sequence.num_computed, 0)
            for sequence in (job.sequence for job in self._jobs.values())
        )

    def evict_adapter(self, name: str) -> None:
        """Give an adapter's pages back at once, if no request uses it; it stays loaded and comes back when needed."""
        self._check_idle(AdapterName(name))
        self._settle(AdapterName(name))
        self._adapters.evict(AdapterName(name))

    def load_adapter(self, name: str, peft_dir: Path | str) -> AdapterInfo:
        """Check and load a PEFT directory under a name; the same content under the same name is loaded once.

        While it is idle its pages may go to others; it is then read from the directory again, which must stay.
        Raises AdapterError naming what is wrong with it, AdapterInUseError when the name's present adapter still runs.
        """
        key = AdapterName(name)
        adapter = self._adapters.check(key, Path(peft_dir))
        present = self._adapters.get(key)
        if present is not None and present.info.digest == adapter.info.digest:
            self._adapters.move(key, adapter)
            return present.info
        self._check_idle(key)
        self._settle(key)
        self._adapters.add(adapter)
        return adapter.info

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapterError, or AdapterInUseError while requests for it run."""
        if name not in self._adapters:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        self._check_idle(AdapterName(name))
        self._settle(AdapterName(name))
        self._adapters.remove(AdapterName(name))

    def _check_idle(self, name: AdapterName) -> None:
        users = sum(job.sequence.adapter == name for job in self._jobs.values())
        if users:
            raise AdapterInUseError(f"adapter {name!r} still has {users} unfinished requests; wait for or cancel them")

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run requests to their end; outputs come in the order of the requests.

        Raises what `add` raises; then none of them runs. Outputs of other requests stay for the next `step`.
        """
        ids = self._add_all(requests)
        outputs: dict[str, Output] = {}
        others: list[Output] = []
        while len(outputs) < len(ids):
            for output in self.step():
                if output.request_id in ids:
                    outputs[output.request_id] = output
                else:
                    others.append(output)
        self._unclaimed.extend(others)
        return [outputs[request_id] for request_id in ids]

    def _add_all(self, requests: Sequence[Request]) -> list[str]:
        ids: list[str] = []
        try:
            ids.extend(self.add(request) for request in requests)
        except EngineError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        return ids

    def add(self, request: Request) -> str:
        """Queue a request and return its id.

        Raises InvalidRequestError, UnknownAdapterError or PromptTooLongError; the engine is then as before.
        """
        request_id = RequestId(request.request_id or f"request-{next(self._numbers)}")
        if request_id in self._jobs:
            raise InvalidRequestError(f"request_id {request_id!r} is already in the engine; ids must be unique")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise UnknownAdapterError(f"adapter {request.adapter!r} is not loaded")
        sampling = request.sampling
        adapter = None if request.adapter is None else self._adapters[AdapterName(request.adapter)]
        sequence = Running(
            request_id=request_id,
            prompt_ids=self._prompt_ids(request),
            sampling=sampling,
            adapter=None if request.adapter is None else AdapterName(request.adapter),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            scope=scope_key(request.tenant, self._instance, None if adapter is None else adapter.info.digest),
            adapter_num_pages=0 if adapter is None else adapter.num_pages,
        )
        self._check_length(sequence)
        text = TextStream(self.tokenizer, sequence.prompt_ids, sampling.stop)
        logprobs: list[dict[int, float]] | None = None if sampling.logprobs is None else []
        self._jobs[request_id] = _Job(sequence, text, time.monotonic(), logprobs=logprobs)
        self._scheduler.add(sequence)
        return request_id

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        given = [request.prompt_token_ids, request.prompt, request.messages]
        if sum(prompt is not None for prompt in given) != 1:
            raise InvalidRequestError("give exactly one of prompt_token_ids, prompt and messages")
        if request.prompt is not None:
            ids: Sequence[int] = self.tokenizer.encode(request.prompt)
        elif request.messages is not None:
            ids = self.tokenizer.encode_chat(request.messages)
        else:
            ids = request.prompt_token_ids or ()
        if not ids:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        vocabulary = self.model_config.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocabulary:
                raise InvalidRequestError(f"token id {token_id} is outside the vocabulary of {vocabulary}")
        return tuple(ids)

    def _check_length(self, sequence: Running) -> None:
        wanted = f"{len(sequence.prompt_ids)} prompt tokens and max_tokens {sequence.sampling.max_tokens}"
        if sequence.max_tokens > self.model_config.max_position:
            raise PromptTooLongError(f"{wanted} exceed the model's context of {self.model_config.max_position} tokens")
        page, pool = self._storage.bytes_per_page_id, self._pool.num_pages
        pages = self._scheduler.pages_for(sequence.max_tokens)
        if pages + sequence.adapter_num_pages > pool:
            beside = f" beside {sequence.adapter_num_pages * page} for the adapter" if sequence.adapter else ""
            raise PromptTooLongError(f"{wanted} need {pages * page} bytes of KV{beside}; the pool has {pool * page}")

    def cancel(self, request_id: str) -> bool:
        """Drop an unfinished request and free its memory; False when the engine does not have it."""
        job = self._jobs.pop(RequestId(request_id), None)
        if job is None:
            return False
        self._scheduler.remove(job.sequence)
        self._check_when_idle()
        return True

    def step(self) -> list[Output]:
        """Compute one batch and return the requests that it finished; at once when there is nothing to do.

        While requests wait for their adapters the others go on; when all of them wait, so does the call, a moment.
        """
        finished, self._unclaimed = self._unclaimed, []
        finished += self._receive()
        slices = self._plan()
        if not slices and self._scheduler.arriving and self._jobs:
            self._adapters.wait(LONGEST_WAIT_S)
            finished += self._receive()
            slices = self._plan()
        if slices:
            finished += self._compute(sorted(slices, key=_adapter_order))
        self._check_when_idle()
        return finished

    def _plan(self) -> list[Slice]:
        """What to compute; adapters that it asks for are sent on their way."""
        plan = self._scheduler.plan()
        for name in plan.loads:
            self._adapters.start(name)
        return plan.slices

    def _receive(self) -> list[Output]:
        """Take up the adapters that have arrived; requests of one that cannot be read fail."""
        failed: list[Output] = []
        for arrival in self._adapters.arrivals():
            if arrival.error is not None:
                jobs = [job for job in self._jobs.values() if job.sequence.adapter == arrival.name]
                failed += [self._finish(job, "stop", arrival.error) for job in jobs]
            self._scheduler.arrived(arrival.name)
            if arrival.error is not None:
                self._adapters.evict(arrival.name)
        return failed

    def _settle(self, name: AdapterName) -> None:
        """Wait until an adapter is no longer on its way, so that it can go."""
        while name in self._scheduler.arriving:
            self._adapters.wait(LONGEST_WAIT_S)
            self._unclaimed += self._receive()

    def _compute(self, slices: list[Slice]) -> list[Output]:
        """One forward pass; returns the requests that its tokens end."""
        batch = build_batch(slices, self._adapter_of, self._adapters.tables)
        self._adapters.use({part.sequence.adapter for part in slices if part.sequence.adapter is not None})
        sampling = [part.sequence for part in slices if part.is_last]
        sampled = self._runner.run(batch, sampling)
        for part in slices:
            self._scheduler.computed(part)
        outputs = [self._advance(self._jobs[s.request_id], choice) for s, choice in zip(sampling, sampled, strict=True)]
        return [output for output in outputs if output is not None]

    def _adapter_of(self, part: Slice) -> LoadedAdapter | None:
        name = part.sequence.adapter
        return None if name is None else self._adapters[name]

    def _advance(self, job: _Job, sampled: Sampled) -> Output | None:
        """Append a sampled token; the output when that ends the request."""
        sequence = job.sequence
        if not sampled.finite:
            what = f"adapter {sequence.adapter!r}" if sequence.adapter else "the base model"
            return self._finish(job, "stop", EngineError(f"{what} computed NaN or infinite values for this prompt"))
        sequence.output_ids.append(sampled.token_id)
        if job.first_token_s is None:
            job.first_token_s = time.monotonic() - job.added_at
        if job.logprobs is not None and sampled.logprobs is not None:
            job.logprobs.append(sampled.logprobs)
        stopped = job.text.push(sampled.token_id)
        if stopped or (sampled.token_id in self._eos_token_ids and not sequence.sampling.ignore_eos):
            return self._finish(job, "stop")
        return self._finish(job, "length") if sequence.num_tokens == sequence.max_tokens else None

    def _finish(self, job: _Job, reason: FinishReason, error: EngineError | None = None) -> Output:
        sequence = job.sequence
        del self._jobs[sequence.request_id]
        self._scheduler.remove(sequence)
        return Output(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.output_ids),
            text=job.text.text,
            finish_reason=reason,
            usage=Usage(len(sequence.prompt_ids), sequence.num_cached or 0, len(sequence.output_ids)),
            logprobs=job.logprobs,
            first_token_s=job.first_token_s,
            error=error,
        )

    def _check_when_idle(self) -> None:
        if not self._jobs and not self._scheduler.arriving:
            self._pool.check_integrity()
            assert self._residency.num_available == self._pool.num_pages


def _adapter_order(part: Slice) -> str:
    return part.sequence.adapter or ""
