"""The engine: add and cancel requests between steps; each step computes a batch and samples from it."""

import itertools
from collections.abc import Mapping, Sequence, Set
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
from engine.types import AdapterInfo, AdapterName, AdapterTraffic, FinishReason, Output, Request, RequestId, Sampled

LONGEST_WAIT_S = 0.02
"""Of a step that has nothing to compute, for an adapter on its way."""


class Engine:
    """One base model and its loaded adapters. One thread adds, cancels and steps; `check_adapter` alone is for any.

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
        self._unclaimed: list[Output] = []
        self._numbers = itertools.count()

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
    def arriving(self) -> Set[str]:
        """Adapters on their way into the pool; unloading one of them waits for its end, which `step` takes up."""
        return self._scheduler.arriving

    @property
    def has_work(self) -> bool:
        """True while a step would do something, or wait for an adapter that a request needs."""
        return bool(self._requests or self._unclaimed)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens of unfinished requests that no step has computed yet."""
        sequences = (state.sequence for state in self._requests.values())
        return sum(max(len(sequence.prompt_ids) - sequence.num_computed, 0) for sequence in sequences)

    def load_adapter(self, name: str, peft_dir: Path | str) -> AdapterInfo:
        """Check and load a PEFT directory under a name; the same content under the same name is loaded once.

        The caller waits for the files: `check_adapter` in a thread of its own and `admit_adapter` let steps go on.
        While it is idle its pages may go to others; it is then read from the directory again, which must stay.
        Raises AdapterError naming what is wrong with it, AdapterInUseError when the name's present adapter still runs.
        """
        key = AdapterName(name)
        if self._admit(key, self.check_adapter(peft_dir)):
            self._adapters.fill(key)
        return self._adapters[key].info

    def check_adapter(self, peft_dir: Path | str) -> CheckedAdapter:
        """Read, check and hash a PEFT directory. Raises AdapterError naming what is wrong with it, and OSError.

        Any thread may call it while another steps: of the engine it reads the model's configuration, which is frozen.
        """
        return check(Path(peft_dir), self.model_config)

    def admit_adapter(self, name: str, checked: CheckedAdapter) -> AdapterInfo:
        """Serve a checked adapter under a name from now on; the same content under the same name stays as it is.

        Reads nothing: its pages are filled beside the steps once a request needs it, from the directory, which must
        stay. Raises AdapterError when they would never fit, AdapterInUseError when the name's present adapter still
        runs; the engine is then as before.
        """
        key = AdapterName(name)
        self._admit(key, checked)
        return self._adapters[key].info

    def _admit(self, name: AdapterName, checked: CheckedAdapter) -> bool:
        """False when the name stands for this content already."""
        present = self._adapters.get(name)
        if present is not None and present.info.digest == checked.info.digest:
            self._adapters.move(name, checked)
            return False
        self._make_idle(name)
        self._adapters.add(name, checked)
        return True

    def evict_adapter(self, name: str) -> None:
        """Give an adapter's pages back at once, if no request uses it; it stays loaded and comes back when needed."""
        self._make_idle(AdapterName(name))
        self._adapters.evict(AdapterName(name))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapterError, or AdapterInUseError while requests for it run."""
        if name not in self._adapters:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        self._make_idle(AdapterName(name))
        self._adapters.remove(AdapterName(name))

    def warm_up(self) -> None:
        """Have the device compile and record what steps need, so that no request waits for that.

        For an engine without requests. On host memory nothing is left to do.
        """
        assert not self._requests
        owner = SequencePages(RequestId("warm-up"))
        (page,) = self._residency.take(owner, 1)
        self._runner.warm_up(page)
        self._pool.release(owner)

    def close(self) -> None:
        """Wait for what the device was given, and let go of what was recorded and of reading threads.

        No other method may be called afterwards; its memory goes with the last reference to it. May be called twice.
        """
        self._reader.close()
        self._backend.device.finish()
        self._runner.close()

    def _make_idle(self, name: AdapterName) -> None:
        """Wait until an adapter is no longer on its way, so that it can go. Raises AdapterInUseError."""
        users = sum(state.sequence.adapter == name for state in self._requests.values())
        if users:
            raise AdapterInUseError(f"adapter {name!r} still has {users} unfinished requests; wait for or cancel them")
        while name in self._scheduler.arriving:
            self._adapters.wait(LONGEST_WAIT_S)
            self._unclaimed += self._receive()

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
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is already in the engine; ids must be unique")
        sequence = self._inputs.sequence(request, request_id)
        self._requests[request_id] = RequestState(sequence, self.tokenizer)
        self._scheduler.add(sequence)
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Drop an unfinished request and free its memory; False when the engine does not have it."""
        state = self._requests.pop(RequestId(request_id), None)
        if state is None:
            return False
        self._scheduler.remove(state.sequence)
        self._check_when_idle()
        return True

    def step(self) -> list[Output]:
        """Compute one batch and return the requests that it finished; at once when there is nothing to do.

        While requests wait for their adapters the others go on; when all of them wait, so does the call, a moment.
        """
        finished, self._unclaimed = self._unclaimed, []
        finished += self._receive()
        slices = self._plan()
        if not slices and self._scheduler.arriving and self._requests:
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
                users = [state for state in self._requests.values() if state.sequence.adapter == arrival.name]
                failed += [self._finish(state, "stop", arrival.error) for state in users]
            self._scheduler.arrived(arrival.name)
            if arrival.error is not None:
                self._adapters.evict(arrival.name)
        return failed

    def _compute(self, slices: list[Slice]) -> list[Output]:
        """One forward pass; returns the requests that its tokens end."""
        batch = build_batch(slices, self._adapter_of, self._adapters.tables)
        self._adapters.use({part.sequence.adapter for part in slices if part.sequence.adapter is not None})
        sampling = [part.sequence for part in slices if part.is_last]
        sampled = self._runner.run(batch, sampling)
        for part in slices:
            self._scheduler.computed(part)
        states = [self._requests[sequence.request_id] for sequence in sampling]
        outputs = [self._advance(state, token) for state, token in zip(states, sampled, strict=True)]
        return [output for output in outputs if output is not None]

    def _adapter_of(self, part: Slice) -> LoadedAdapter | None:
        name = part.sequence.adapter
        return None if name is None else self._adapters[name]

    def _advance(self, state: RequestState, sampled: Sampled) -> Output | None:
        """Give a request its next token; the output when that ends it."""
        if not sampled.finite:
            adapter = state.sequence.adapter
            what = f"adapter {adapter!r}" if adapter else "the base model"
            return self._finish(state, "stop", EngineError(f"{what} computed NaN or infinite values for this prompt"))
        reason = state.advance(sampled, self._eos_token_ids)
        return None if reason is None else self._finish(state, reason)

    def _finish(self, state: RequestState, reason: FinishReason, error: EngineError | None = None) -> Output:
        del self._requests[state.sequence.request_id]
        self._scheduler.remove(state.sequence)
        return state.output(reason, error)

    def _check_when_idle(self) -> None:
        if not self._requests and not self._scheduler.arriving:
            self._pool.check_integrity()
            assert self._residency.num_available == self._pool.num_pages


def _adapter_order(part: Slice) -> str:
    return part.sequence.adapter or ""
