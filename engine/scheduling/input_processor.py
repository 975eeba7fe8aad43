"""Validates requests and turns them into sequences for the scheduler."""

import secrets
from collections.abc import Mapping, Sequence

from engine.errors import InvalidRequestError, PromptTooLongError, UnknownAdapterError
from engine.files.model_config import ModelConfig
from engine.lora.store import LoadedAdapter
from engine.memory.prefix import scope_key
from engine.memory.storage import Storage
from engine.model.tokenizer import Tokenizer
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as ScheduledSequence
from engine.types import AdapterName, Request, RequestId


class InputProcessor:
    """Checks, renders and tokenizes requests for one engine, without changing the engine's state."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelConfig,
        adapters: Mapping[AdapterName, LoadedAdapter],
        storage: Storage,
        scheduler: Scheduler,
    ) -> None:
        self._tokenizer, self._model, self._adapters = tokenizer, model, adapters
        self._storage, self._scheduler = storage, scheduler
        self._instance = secrets.token_bytes(16)

    def to_sequence(self, request: Request, request_id: RequestId) -> ScheduledSequence:
        """A new sequence for a request.

        Raises UnknownAdapterError, InvalidRequestError, or PromptTooLongError if the request can never fit.
        """
        name = None if request.adapter is None else AdapterName(request.adapter)
        if name is not None and name not in self._adapters:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        adapter, sampling = None if name is None else self._adapters[name], request.sampling
        sequence = ScheduledSequence(
            request_id=request_id,
            prompt_ids=self._prompt_ids(request),
            sampling=sampling,
            adapter=name,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            scope=scope_key(request.tenant, self._instance, None if adapter is None else adapter.info.digest),
            adapter_num_pages=0 if adapter is None else adapter.num_pages,
            displaces=None if request.displaces is None else RequestId(request.displaces),
        )
        self._check_length(sequence)
        return sequence

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        given = [request.prompt_token_ids, request.prompt, request.messages]
        if sum(prompt is not None for prompt in given) != 1:
            raise InvalidRequestError("give exactly one of prompt_token_ids, prompt and messages")
        if request.prompt is not None:
            ids: Sequence[int] = self._tokenizer.encode(request.prompt)
        elif request.messages is not None:
            ids = self._tokenizer.encode_chat(request.messages)
        else:
            ids = request.prompt_token_ids or ()
        if not ids:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        vocabulary = self._model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocabulary:
                raise InvalidRequestError(f"token id {token_id} is outside the vocabulary of {vocabulary}")
        return tuple(ids)

    def _check_length(self, sequence: ScheduledSequence) -> None:
        length = f"{len(sequence.prompt_ids)} prompt tokens and max_tokens {sequence.sampling.max_tokens}"
        if sequence.max_tokens > self._model.max_position:
            raise PromptTooLongError(f"{length} exceed the model's context of {self._model.max_position} tokens")
        page, pool = self._storage.bytes_per_page_id, self._storage.num_pages
        pages = self._scheduler.pages_for(sequence.max_tokens)
        if pages + sequence.adapter_num_pages > pool:
            adapter = f" and {sequence.adapter_num_pages * page} for the adapter" if sequence.adapter else ""
            raise PromptTooLongError(f"{length} need {pages * page} bytes of KV{adapter}; the pool has {pool * page}")
