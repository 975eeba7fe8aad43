"""The error tree of the engine; each text is one sentence that names the culprit and says what to do.

EngineError
├── ConfigurationError       a field of EngineConfig is out of bounds
├── ModelError               the base model's directory cannot be served
├── AdapterError             an adapter's directory cannot be served
├── AdapterInUseError        the adapter still has running requests
└── RequestError             one request cannot be served
    ├── InvalidRequestError  a field of it is wrong
    ├── PromptTooLongError   it exceeds the model's context or the engine's memory
    └── UnknownAdapterError  its adapter is not loaded
"""


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class ConfigurationError(EngineError):
    """A field of EngineConfig is out of bounds."""


class ModelError(EngineError):
    """The base model's directory is incomplete, broken or of a kind that the engine does not know."""


class AdapterError(EngineError):
    """An adapter's directory is incomplete, broken or does not fit the base model."""


class AdapterInUseError(EngineError):
    """The adapter still has running requests, so it can be neither unloaded nor replaced."""


class RequestError(EngineError):
    """One request cannot be served; others are untouched."""


class InvalidRequestError(RequestError):
    """A field of the request is wrong."""


class PromptTooLongError(RequestError):
    """Prompt and max_tokens together exceed the model's context or the engine's memory."""


class UnknownAdapterError(RequestError):
    """The request names an adapter that is not loaded."""
