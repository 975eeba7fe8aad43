"""The error tree of services.

ServiceError
├── RetryableError        the infrastructure failed; the same call may work later
└── PermanentError        the same call will fail again
    ├── ConfigError       a setting is missing or wrong; the message names it
    │   ├── MissingSettingError   the setting is not set
    │   └── MissingTopicError     it names a topic that does not exist
    └── InputError        a command or a record is invalid; the message names the culprit and what to do
        └── JobError      fails one job, with a stable code
"""

from schemas.common import ErrorCode


class ServiceError(Exception):
    """Base of all errors that services raise on purpose. The message is one sentence for people."""


class RetryableError(ServiceError):
    """The infrastructure failed; the same call may work later."""


class PermanentError(ServiceError):
    """The same call will fail again."""


class ConfigError(PermanentError):
    """A setting is missing or wrong."""


class MissingSettingError(ConfigError):
    """A required setting is not set."""


class MissingTopicError(ConfigError):
    """A topic that the settings name does not exist."""


class InputError(PermanentError):
    """A command or a record asks for something that cannot be done."""


class JobError(InputError):
    """One job cannot succeed; `code` is its stable error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
