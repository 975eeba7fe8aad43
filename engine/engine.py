"""The engine. Requests are added and cancelled between steps; each step computes one batch and samples from it."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType

import torch

from engine.config import EngineConfig
from engine.device.backend import Backend, open_backend, torch_dtype
from engine.errors import AdapterInUseError, EngineError, InvalidRequestError, UnknownAdapterError
from engine.files.model_config import read_model_config
from engine.lora.checked import CheckedAdapter, check
from engine.lora.reading import Reader, ThreadReader
from engine.lora.store import AdapterStore, LoadedAdapter
from engine.lora.tables import SlotTables
from engine.lora.transfer import make_loader
from engine.memory.pool import PagePool, SequencePages
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.model.decoder import Decoder
from engine.model.tokenizer import Tokenizer
from engine.model.weights import Stored, load_weights, stored_tensors
from engine.model.workspace import Workspace
from engine.scheduling.input_processor import InputProcessor
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduler import Scheduler, Slice
from engine.step.batch import build_batch
from engine.step.runner import make_runner
from engine.types import (
    AdapterInfo,
    AdapterName,
    AdapterTraffic,
    FinishReason,
    Output,
    PreparedRequest,
    Request,
    RequestId,
    Sampled,
    StepStats,
)

DATA_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError)
"""What a request's data can make Python code raise; kernels, devices and our own invariants raise others."""
MAX_WAIT_S = 0.02
"""How long a step with nothing to compute waits for an adapter to load."""


class Engine:
    """One base model and its loaded adapters. Not thread-safe, except `check_adapter` and `prepare`.

    Raises ModelError if the model's directory cannot be served, and ConfigurationError if memory is too small or the
    device is not available. `backend` overrides the backend of the configured device, `reader` the threads that read
    adapters while steps run, and `weights` the tensors in the model's directory.
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
        tables = SlotTables(self._storage, is_remote=self._backend.is_remote)
        self._reader = reader or ThreadReader()
        loader = make_loader(self._backend, self._reader, self._storage, config.host_bytes)
        self._adapters = AdapterStore(self._storage, self._pool, self._residency, tables, loader)
        self._decoder = self._make_decoder(dtype, weights or stored_tensors(config.model_dir))
        self._runner = make_runner(config, self._backend, self._decoder, tables, self._storage)
        self._scheduler = Scheduler(
            self._pool,
            self._residency,
            self._storage.tokens_per_page,
            config.max_batch_size,
            config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._inputs = InputProcessor(self.tokenizer, self.model_config, self._adapters, self._storage, self._scheduler)
        self._requests: dict[RequestId, RequestState] = {}
        self._pending_outputs: list[Output] = []
        self._numbers = itertools.count()
        self._stats = StepStats()

    def _make_decoder(self, dtype: torch.dtype, stored: Mapping[str, Stored]) -> Decoder:
        model, config = self.model_config, self.config
        kernels, device = self._backend.kernels, self._backend.device.torch_device
        weights = load_weights(stored, model, dtype, kernels, device)
        workspace = Workspace(model, dtype, config.max_batch_tokens, config.max_batch_size, device)
        return Decoder(model, weights, kernels, self._storage, self._adapters.tables, workspace)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The loaded adapters by name."""
        return MappingProxyType({str(name): adapter.info for name, adapter in self._adapters.items()})

    @property
    def adapter_traffic(self) -> AdapterTraffic:
        """Adapter loads since the start; each load reads the files, and its bytes are those of the adapter's pages."""
        residency, page = self._residency, self._storage.bytes_per_page_id
        pages_in, pages_out = residency.adapter_pages_in, residency.adapter_pages_out
        return AdapterTraffic(residency.num_adapter_loads, pages_in * page, pages_out * page)

    @property
    def resident_adapters(self) -> Set[str]:
        """Adapters that have pages in the pool, including those that are being loaded."""
        return {owner.name for owner in self._residency.adapters}

    @property
    def stats(self) -> StepStats:
        """What the steps have computed and read since the engine's start."""
        return self._stats

    def expect(self, adapters: Iterable[str]) -> None:
        """Name the adapters that requests not yet added will need, the one needed first first.

        Idle adapters are evicted in the reverse of that order, after all others. Replaces the last list; unknown names
        have no effect.
        """
        self._scheduler.expect(map(AdapterName, adapters))

    @property
    def loading_adapters(self) -> Set[str]:
        """Adapters being loaded into the pool. Unloading one of them first waits for its load; `step` completes it."""
        return self._scheduler.loading

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished or outputs have not been returned yet."""
        return bool(self._requests or self._pending_outputs)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens of unfinished requests that no step has computed yet."""
        sequences = (state.sequence for state in self._requests.values())
        return sum(max(len(sequence.prompt_ids) - sequence.num_computed, 0) for sequence in sequences)

    def load_adapter(self, name: str, peft_dir: Path | str) -> AdapterInfo:
        """Check and load a PEFT directory under a name; the same content under the same name is loaded once.

        Blocks until the files are read; to keep stepping meanwhile, call `check_adapter` in another thread and then
        `admit_adapter`. An idle adapter may be evicted and is then read again, so the directory must stay in place.
        Raises AdapterError describing the defect, or AdapterInUseError if requests for the adapter it replaces run.
        """
        key = AdapterName(name)
        if self._admit(key, self.check_adapter(peft_dir)):
            self._adapters.load_now(key)
        return self._adapters[key].info

    def check_adapter(self, peft_dir: Path | str) -> CheckedAdapter:
        """Read, check and hash a PEFT directory. Raises AdapterError describing the defect, or OSError.

        Thread-safe: the only engine state it reads is the model's configuration, which is frozen.
        """
        return check(Path(peft_dir), self.model_config)

    def admit_adapter(self, name: str, checked: CheckedAdapter) -> AdapterInfo:
        """Register a checked adapter under a name; a no-op if the name already has the same content.

        Reads no file: the adapter is loaded in the background when a request first needs it, so its directory must stay
        in place. Raises AdapterError if its pages can never fit, or AdapterInUseError if requests for the adapter it
        replaces run; the engine is then unchanged.
        """
        key = AdapterName(name)
        self._admit(key, checked)
        return self._adapters[key].info

    def _admit(self, name: AdapterName, checked: CheckedAdapter) -> bool:
        """Register a checked adapter; False if the name already has this content."""
        present = self._adapters.get(name)
        if present is not None and present.info.digest == checked.info.digest:
            self._adapters.set_source(name, checked)
            return False
        self._make_idle(name)
        self._adapters.add(name, checked)
        return True

    def evict_adapter(self, name: str) -> None:
        """Free an adapter's pages now. It stays registered and is loaded again when needed.

        Raises AdapterInUseError while requests for it are unfinished.
        """
        self._make_idle(AdapterName(name))
        self._adapters.evict(AdapterName(name))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises UnknownAdapterError, or AdapterInUseError while requests for it are unfinished."""
        if name not in self._adapters:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        self._make_idle(AdapterName(name))
        self._adapters.remove(AdapterName(name))

    def warm_up(self) -> None:
        """Compile and record what steps need, so that no request waits for it. Does nothing on the CPU.

        The engine must have no requests.
        """
        assert not self._requests
        owner = SequencePages(RequestId("warm-up"))
        (page,) = self._residency.allocate(owner, 1)
        self._runner.warm_up(page)
        self._pool.release(owner)

    def close(self) -> None:
        """Wait for the device to finish, drop recorded graphs and stop the reader threads. Idempotent.

        No other method may be called afterwards. Memory is freed with the last reference to the engine.
        """
        self._reader.close()
        self._backend.device.synchronize()
        self._runner.close()

    def _make_idle(self, name: AdapterName) -> None:
        """Wait until an adapter is not being loaded. Raises AdapterInUseError if a request uses it."""
        users = sum(state.sequence.adapter == name for state in self._requests.values())
        if users:
            raise AdapterInUseError(f"adapter {name!r} still has {users} unfinished requests; wait for or cancel them")
        while name in self._scheduler.loading:
            self._adapters.wait(MAX_WAIT_S)
            self._pending_outputs += self._receive()

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run requests to completion and return their outputs in the order of the requests.

        Raises what `add` raises; none of the requests runs then. The next `step` returns outputs of other requests.
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
        self._pending_outputs.extend(others)
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

    def prepare(self, request: Request) -> PreparedRequest:
        """Check, render and tokenize a request for `add_prepared`.

        Any thread may call this while another one runs steps: it reads only what never changes. Raises
        InvalidRequestError or PromptTooLongError.
        """
        return self._inputs.prepare(request)

    def add(self, request: Request) -> str:
        """Prepare and queue a request and return its id.

        Raises InvalidRequestError, UnknownAdapterError or PromptTooLongError; the engine is then unchanged.
        """
        return self.add_prepared(self.prepare(request))

    def add_prepared(self, prepared: PreparedRequest) -> str:
        """Queue a prepared request and return its id. Raises what `add` raises; the engine is then unchanged."""
        request_id = RequestId(prepared.request.request_id or f"request-{next(self._numbers)}")
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is already in the engine; ids must be unique")
        sequence = self._inputs.to_sequence(prepared, request_id)
        self._requests[request_id] = RequestState(sequence, self.tokenizer, prepared.began_at)
        self._scheduler.add(sequence)
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Cancel an unfinished request and free its memory; False if there is no such request."""
        state = self._requests.pop(RequestId(request_id), None)
        if state is None:
            return False
        self._scheduler.remove(state.sequence)
        self._check_when_idle()
        return True

    def step(self) -> list[Output]:
        """Compute one batch and return the requests that it finished; returns immediately if there is nothing to do.

        Requests whose adapters are being loaded do not hold up others. If all of them wait, so does the call, briefly.
        """
        finished, self._pending_outputs = self._pending_outputs, []
        finished += self._receive()
        slices = self._plan()
        if not slices and self._scheduler.loading and self._requests:
            self._adapters.wait(MAX_WAIT_S)
            finished += self._receive()
            slices = self._plan()
        if slices:
            finished += self._compute(sorted(slices, key=_adapter_order))
        self._check_when_idle()
        return finished

    def _plan(self) -> list[Slice]:
        """The slices to compute; starts the adapter loads that the scheduler asks for."""
        plan = self._scheduler.plan()
        for name in plan.loads:
            self._adapters.start_load(name)
        return plan.slices

    def _receive(self) -> list[Output]:
        """Complete finished adapter loads; if one failed, fail the requests that use the adapter."""
        failed: list[Output] = []
        for load in self._adapters.finished_loads():
            if load.error is not None:
                users = [state for state in self._requests.values() if state.sequence.adapter == load.name]
                failed += [self._finish(state, "stop", load.error) for state in users]
            self._scheduler.load_finished(load.name)
            if load.error is not None:
                self._adapters.evict(load.name)
        return failed

    def _compute(self, slices: list[Slice]) -> list[Output]:
        """Run one forward pass; returns the requests that its tokens finish.

        If the pass raises an error that the data of one request can cause, each request is computed alone, and those
        that raise again end with that error. If all of them raise, the requests are not the cause, and it is raised.
        """
        try:
            return self._forward(slices)
        except DATA_ERRORS:
            outputs, failed = self._forward_each(slices)
            if len(failed) == len(slices) > 1:
                raise
        return outputs + [self._fail(part.sequence.request_id, error) for part, error in failed]

    def _forward_each(self, slices: list[Slice]) -> tuple[list[Output], list[tuple[Slice, Exception]]]:
        outputs: list[Output] = []
        failed: list[tuple[Slice, Exception]] = []
        for part in slices:
            try:
                outputs += self._forward([part])
            except DATA_ERRORS as error:
                failed.append((part, error))
        return outputs, failed

    def _forward(self, slices: list[Slice]) -> list[Output]:
        """Nothing of a request has changed if this raises."""
        began = time.perf_counter()
        batch = build_batch(slices, self._adapter_of, self._adapters.tables)
        adapters = {part.sequence.adapter for part in slices if part.sequence.adapter is not None}
        self._adapters.use(adapters)
        sampling = [part.sequence for part in slices if part.is_last]
        sampled = self._runner.run(batch, sampling)
        self._count(slices, adapters, time.perf_counter() - began)
        for part in slices:
            self._scheduler.computed(part)
        states = [self._requests[sequence.request_id] for sequence in sampling]
        outputs = [self._advance(state, token) for state, token in zip(states, sampled, strict=True)]
        return [output for output in outputs if output is not None]

    def _fail(self, request_id: RequestId, error: Exception) -> Output:
        failure = EngineError(f"the request made a step fail: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return self._finish(self._requests[request_id], "stop", failure)

    def _count(self, slices: list[Slice], adapters: Set[AdapterName], seconds: float) -> None:
        decoded = sum(part.num_tokens == 1 for part in slices)
        is_decode_only = decoded == len(slices)
        self._stats += StepStats(
            steps=1,
            busy_s=seconds,
            prefill_tokens=sum(part.num_tokens for part in slices) - decoded,
            decode_tokens=decoded,
            decode_only_s=seconds if is_decode_only else 0.0,
            decode_only_tokens=decoded if is_decode_only else 0,
            adapters=len(adapters),
            adapter_bytes=sum(self._adapters[name].info.num_bytes for name in adapters),
        )

    def _adapter_of(self, part: Slice) -> LoadedAdapter | None:
        name = part.sequence.adapter
        return None if name is None else self._adapters[name]

    def _advance(self, state: RequestState, sampled: Sampled) -> Output | None:
        """Append a request's next token; returns the output if that finishes the request."""
        if not sampled.finite:
            adapter = state.sequence.adapter
            source = f"adapter {adapter!r}" if adapter else "the base model"
            return self._finish(state, "stop", EngineError(f"{source} computed NaN or infinite values for this prompt"))
        try:
            reason = state.advance(sampled, self._eos_token_ids)
        except DATA_ERRORS as error:
            return self._fail(state.sequence.request_id, error)
        return None if reason is None else self._finish(state, reason)

    def _finish(self, state: RequestState, reason: FinishReason, error: EngineError | None = None) -> Output:
        del self._requests[state.sequence.request_id]
        self._scheduler.remove(state.sequence)
        return state.output(reason, error)

    def _check_when_idle(self) -> None:
        if not self._requests and not self._scheduler.loading:
            self._pool.check_integrity()
            assert self._residency.num_available == self._pool.num_pages


def _adapter_order(part: Slice) -> str:
    return part.sequence.adapter or ""
