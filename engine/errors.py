"""The engine's exceptions. Each message is one sentence that names the cause and the remedy.

EngineError
├── ConfigurationError       a field of EngineConfig is invalid or the device is not available
├── ModelError               the base model's directory cannot be served
├── AdapterError             an adapter's directory cannot be served
├── AdapterInUseError        the adapter has unfinished requests
└── RequestError             one request cannot be served
    ├── InvalidRequestError  a field of it is invalid
    ├── PromptTooLongError   it exceeds the model's context or the engine's memory
    └── UnknownAdapterError  its adapter is not loaded
"""


class EngineError(Exception):
    """Base class of all exceptions that the engine raises deliberately."""


class ConfigurationError(EngineError):
    """A field of EngineConfig is invalid, or the configured device is not available."""


class ModelError(EngineError):
    """The base model's directory is incomplete, damaged or of an unsupported kind."""


class AdapterError(EngineError):
    """An adapter's directory is incomplete or damaged, or does not fit the base model."""


class AdapterInUseError(EngineError):
    """The adapter has unfinished requests, so it cannot be unloaded, evicted or replaced."""


class RequestError(EngineError):
    """One request cannot be served; other requests are not affected."""


class InvalidRequestError(RequestError):
    """A field of the request is invalid."""


class PromptTooLongError(RequestError):
    """Prompt and max_tokens together exceed the model's context or the engine's memory."""


class UnknownAdapterError(RequestError):
    """The request names an adapter that is not loaded."""
