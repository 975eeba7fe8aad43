"""The error tree of services.

ServiceError
├── RetryableError        the infrastructure's fault: the same call may work later
└── PermanentError        the same call will fail again
    ├── ConfigError       a setting is missing or wrong; names it
    │   ├── MissingSettingError   it is missing
    │   └── MissingTopicError     it names a topic that does not exist
    └── InputError        what a person or a record asked for is wrong; names the culprit and what to do
        └── JobError      fails one job, with its stable code
"""

from schemas.common import ErrorCode


class ServiceError(Exception):
    """Base of everything that services raise on purpose; its text is one sentence for a person."""


class RetryableError(ServiceError):
    """The infrastructure failed; the same call may work later."""


class PermanentError(ServiceError):
    """The same call will fail again."""


class ConfigError(PermanentError):
    """A setting is missing or wrong."""


class MissingSettingError(ConfigError):
    """A setting that is needed is not set."""


class MissingTopicError(ConfigError):
    """A topic that the settings name does not exist."""


class InputError(PermanentError):
    """A person or a record asked for something that cannot be done."""


class JobError(InputError):
    """One job cannot succeed; `code` is its stable error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
