"""The base model's tokenizer and chat template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from engine.errors import InvalidRequestError, ModelError
from engine.model.chat import ChatTemplate
from engine.model.control_tokens import ControlTokens
from engine.model.vocabulary import TokenCounts, component, parts_of

SPECIAL_TOKEN_FIELDS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json and the chat template; raises ModelError naming a bad file.

    Truncation and padding, which training may leave in tokenizer.json, are off. Encoding, rendering and decoding are
    thread-safe.
    """

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = _load(model_dir / "tokenizer.json")
        self.counts = TokenCounts(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_texts = tuple(token.content for token in added.values() if token.special)
        self._control = ControlTokens([token.content for token in added.values()])
        self._separator_id = self._add_separator()
        special_ids = [token_id for token_id, token in added.items() if token.special]
        self._special_ids = frozenset([*special_ids, self._separator_id])
        self._matches_normalized = any(token.normalized and not token.content.isspace() for token in added.values())
        settings = _read_settings(model_dir / "tokenizer_config.json")
        names = {name: _token_text(settings.get(name)) for name in SPECIAL_TOKEN_FIELDS}
        self._special = {name: text for name, text in names.items() if text is not None}
        source = _template_source(model_dir / "chat_template.jinja", settings.get("chat_template"))
        self._template = None if source is None else ChatTemplate(source, self._special, model_dir)

    def _add_separator(self) -> int:
        separator = self._control.separator
        self._tokenizer.add_special_tokens([AddedToken(separator, special=True, normalized=False)])
        token_id: int = self._tokenizer.token_to_id(separator)
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """Id of the `eos_token` in tokenizer_config.json."""
        text = self._special.get("eos_token")
        token_id: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return token_id

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token is a fixed sequence of bytes, in GPT-2's alphabet, independent of its neighbours."""
        return [part["type"] for part in parts_of(component(self._tokenizer.decoder), "decoders")] == ["ByteLevel"]

    def encode(self, text: str, *, allow_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds.

        The text of an added token in the prompt becomes that token, unless `allow_special_tokens` is false. Raises
        InvalidRequestError.
        """
        return self.encode_text(text if allow_special_tokens else self.without_control(text), add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's reply. Raises InvalidRequestError; see `render`."""
        return self.encode_text(self.conversation(messages), add_special_tokens=False)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text from `conversation` or `without_control`, or of any other text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if self._control.separator in text:
            return [token_id for token_id in ids if token_id != self._separator_id]
        return ids

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What `render` returns, prepared for `encode_text`: the text of control tokens in a message remains text.

        Raises InvalidRequestError.
        """
        self._check_normalized(value for message in messages for value in message.values())
        return self._control.rendered(messages, self.render)

    def without_control(self, text: str) -> str:
        """A text prepared for `encode_text`, in which control tokens remain text. Raises InvalidRequestError."""
        self._check_normalized([text])
        return self._control.separated(text)

    def _check_normalized(self, texts: Iterable[str]) -> None:
        """Reject texts in which normalization creates a marker, because it cannot be separated beforehand."""
        if not self._matches_normalized or self._tokenizer.normalizer is None:
            return
        for text in texts:
            if self._control.count(self._tokenizer.normalizer.normalize_str(text)) > self._control.count(text):
                raise InvalidRequestError("a message has a control token of the model in another spelling; remove it")

    def size(self, text: str) -> int:
        """Number of characters of a text for `encode_text`, without separators."""
        return len(text) - len(self._control.separator) * text.count(self._control.separator)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Apply the chat template to a conversation. Raises InvalidRequestError if it fails or there is none."""
        if self._template is None:
            raise InvalidRequestError("messages were given, but the base model has no chat template; send a prompt")
        return self._template.render(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str | None:
        """A token as written in the vocabulary; None if there is no token with this id."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` omits the token."""
        return token_id in self._special_ids

    def with_special(self, texts: Iterable[str]) -> tuple[str, ...]:
        """The texts that contain the text of a special token."""
        return tuple(text for text in texts if any(special in text for special in self._special_texts))


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} does not exist; the base model needs a tokenizer.json")
    try:
        tokenizer = RustTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_source(path: Path, setting: Any) -> str | None:
    """The template from its own file, or from a setting: a string, or a list of named templates with a `default`."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(setting, list):
        return next((entry["template"] for entry in setting if entry.get("name") == "default"), None)
    return setting if isinstance(setting, str) else None
