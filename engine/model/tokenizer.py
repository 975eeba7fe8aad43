"""The base model's tokenizer and chat template."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from engine.errors import InvalidRequestError, ModelError

SPECIAL_TOKEN_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json and the chat template; raises ModelError naming a bad file."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = _load(model_dir / "tokenizer.json")
        settings = _read_settings(model_dir / "tokenizer_config.json")
        self._special = {name: _token_text(settings.get(name)) for name in SPECIAL_TOKEN_FIELDS}
        source = _template_source(model_dir / "chat_template.jinja", settings.get("chat_template"))
        self._template = None if source is None else _compile(source, model_dir)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the `eos_token` in tokenizer_config.json."""
        text = self._special["eos_token"]
        token_id: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's reply. Raises InvalidRequestError; see `render`."""
        ids: list[int] = self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids
        return ids

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Apply the chat template to a conversation. Raises InvalidRequestError if it fails or there is none."""
        if self._template is None:
            raise InvalidRequestError("messages were given, but the base model has no chat template; send a prompt")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **{name: text for name, text in self._special.items() if text is not None},
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the base model's chat template rejects the messages: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} does not exist; the base model needs a tokenizer.json")
    try:
        return RustTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from error


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


def _compile(source: str, model_dir: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template in {model_dir} is invalid: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(layout)
