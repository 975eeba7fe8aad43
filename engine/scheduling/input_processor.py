"""Validates requests and turns them into sequences for the scheduler."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.errors import EngineError, InvalidRequestError, PromptTooLongError, UnknownAdapterError
from engine.files.model_config import ModelConfig
from engine.lora.store import LoadedAdapter
from engine.memory.prefix import scope_key
from engine.memory.storage import Storage
from engine.model.tokenizer import Tokenizer
from engine.scheduling.request_check import check_encodable, check_messages, check_token_ids, check_types
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as ScheduledSequence
from engine.types import AdapterName, PreparedRequest, Request, RequestId

FIRST_CHARACTERS_PER_TOKEN = 6
"""Sets how much of a long text is tokenized first; prose has four or five characters per token."""
SURE_SHARE = 0.75
"""Assumed share of a beginning's tokens that the whole text has too, if a token may span the cut. Usually only tokens
next to the cut differ; a tokenizer could be built in which each merge depends on the next."""


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

    def prepare(self, request: Request) -> PreparedRequest:
        """Check, render and tokenize a request; thread-safe.

        Raises PromptTooLongError if the request can never fit, and InvalidRequestError for all other errors, including
        those that the chat template or the tokenizer raises.
        """
        began_at = time.monotonic()
        try:
            check_types(request)
            ids = self._prompt_ids(request)
            self._check_fits(len(ids), request.sampling.max_tokens)
        except (EngineError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer is not an Exception
            raise InvalidRequestError(f"the request cannot be read: {type(error).__name__}: {error}") from error
        return PreparedRequest(replace(request, prompt_token_ids=None, prompt=None, messages=None), ids, began_at)

    def to_sequence(self, prepared: PreparedRequest, request_id: RequestId) -> ScheduledSequence:
        """A new sequence for a request.

        Raises UnknownAdapterError, or PromptTooLongError if the request can never fit together with its adapter.
        """
        request, sampling = prepared.request, prepared.request.sampling
        name = None if request.adapter is None else AdapterName(request.adapter)
        if name is not None and name not in self._adapters:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        adapter = None if name is None else self._adapters[name]
        adapter_num_pages = 0 if adapter is None else adapter.num_pages
        self._check_fits(len(prepared.prompt_ids), sampling.max_tokens, adapter_num_pages)
        return ScheduledSequence(
            request_id=request_id,
            prompt_ids=prepared.prompt_ids,
            sampling=sampling,
            adapter=name,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            scope=scope_key(request.tenant, self._instance, None if adapter is None else adapter.info.digest),
            adapter_num_pages=adapter_num_pages,
            displaces=None if request.displaces is None else RequestId(request.displaces),
        )

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        max_tokens = request.sampling.max_tokens
        if request.prompt is not None:
            ids = self._encode_prompt(request.prompt, max_tokens, request.allow_special_tokens)
        elif request.messages is not None:
            check_messages(request.messages)
            ids = self._encode_chat(request.messages, max_tokens)
        else:
            ids = self._given_ids(request.prompt_token_ids or (), max_tokens)
        if not ids:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        vocabulary = self._model.vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
            raise InvalidRequestError(f"token id {wrong} is outside the vocabulary of {vocabulary}")
        return tuple(ids)

    def _given_ids(self, ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        self._check_fits(len(ids), max_tokens)
        check_token_ids(ids)
        return ids

    def _encode_prompt(self, prompt: str, max_tokens: int, allow_special_tokens: bool) -> Sequence[int]:
        self._check_size(prompt, max_tokens)
        check_encodable("prompt", prompt)
        text = prompt if allow_special_tokens else self._tokenizer.without_control(prompt)
        return self._encode(text, max_tokens, add_special_tokens=True)

    def _encode_chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Sequence[int]:
        self._check_size(self._tokenizer.render(messages), max_tokens)
        return self._encode(self._tokenizer.conversation(messages), max_tokens, add_special_tokens=False)

    def _check_size(self, text: str, max_tokens: int) -> None:
        """Reject a prompt that cannot fit by its size in bytes, which is much faster than tokenizing it."""
        least = self._tokenizer.counts.least(text)
        if least > self._room(max_tokens):
            size = len(text.encode("utf-8", "surrogatepass"))
            self._check_fits(least, max_tokens, prompt=f"a prompt of {size} bytes has at least {least} tokens; these")

    def _encode(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text in growing beginnings, and stop as soon as one shows that the text cannot fit."""
        end = FIRST_CHARACTERS_PER_TOKEN * max(self._room(max_tokens), 1)
        while end < len(text):
            seam = self._tokenizer.counts.cut(text, end)
            beginning = text[: seam or end]
            num_tokens = len(self._tokenizer.encode_text(beginning, add_special_tokens=add_special_tokens))
            least = num_tokens - 1 if seam else int(num_tokens * SURE_SHARE)
            size, whole = self._tokenizer.size(beginning), self._tokenizer.size(text)
            prompt = f"the first {size} of {whole} characters of the prompt have at least {least} tokens; these"
            self._check_fits(least, max_tokens, prompt=prompt)
            end *= 2
        return self._tokenizer.encode_text(text, add_special_tokens=add_special_tokens)

    def _room(self, max_tokens: int) -> int:
        """Most tokens that a prompt may have."""
        pool = self._storage.num_pages * self._storage.tokens_per_page
        return min(self._model.max_position, pool) - max_tokens

    def _check_fits(
        self, num_prompt: int, max_tokens: int, adapter_num_pages: int = 0, prompt: str | None = None
    ) -> None:
        total = num_prompt + max_tokens
        length = f"{prompt or f'{num_prompt} prompt tokens'} and max_tokens {max_tokens}"
        if total > self._model.max_position:
            raise PromptTooLongError(f"{length} exceed the model's context of {self._model.max_position} tokens")
        page, pool = self._storage.bytes_per_page_id, self._storage.num_pages
        pages = self._scheduler.pages_for(total)
        if pages + adapter_num_pages > pool:
            adapter = f" and {adapter_num_pages * page} for the adapter" if adapter_num_pages else ""
            raise PromptTooLongError(f"{length} need {pages * page} bytes of KV{adapter}; the pool has {pool * page}")
