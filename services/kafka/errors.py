"""Translates Kafka's errors into ours, and recovers the reason where the library only logs it."""

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    KafkaError,
    MessageSizeTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)

from services.errors import ConfigError, InputError, RetryableError, ServiceError
from services.process import telemetry
from services.process.settings import Settings

_REFUSED = (AuthenticationFailedError, AuthenticationMethodNotSupported, SaslAuthenticationFailed)
_MECHANISM = (UnsupportedSaslMechanismError, IllegalSaslStateError)
_FORBIDDEN = (TopicAuthorizationFailedError, GroupAuthorizationFailedError, ClusterAuthorizationFailedError)
_CONCLUSIVE = (*_REFUSED, *_MECHANISM, ssl.SSLError)


class _Attempt:
    """The start of one client: the errors of its brokers. Background tasks of the client outlive it."""

    def __init__(self) -> None:
        self.reasons: list[Exception] = []
        self.over = False


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)


class _Reasons(logging.Filter):
    """While a client starts, keeps the error of each broker, which the library logs but does not raise."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a line whose reason was kept, since the error that follows contains it."""
        attempt = _attempt.get()
        if attempt is None or attempt.over or not str(record.msg).startswith("Unable "):
            return True
        reason = record.args[-1] if isinstance(record.args, tuple) and record.args else None
        if isinstance(reason, Exception):
            attempt.reasons.append(reason)
        return not isinstance(reason, Exception)


logging.getLogger("aiokafka").addFilter(_Reasons())
_log = telemetry.get_logger()


def translated(error: BaseException, settings: Settings) -> ServiceError:
    """Our error for one of Kafka's: retryable unless credentials, permissions or the record's size are wrong."""
    place = f"Kafka at {settings.kafka_bootstrap}"
    reason = str(error) or type(error).__name__
    if isinstance(error, _REFUSED):
        return ConfigError(f"{place} refused the credentials; check LORAQ_KAFKA_SASL_USERNAME and _PASSWORD: {reason}")
    if isinstance(error, _MECHANISM):
        mechanism = settings.kafka_sasl_mechanism
        return ConfigError(f"{place} does not support LORAQ_KAFKA_SASL_MECHANISM={mechanism}: {reason}")
    if isinstance(error, ssl.SSLCertVerificationError):
        what = "LORAQ_KAFKA_SSL_CAFILE and the host name in LORAQ_KAFKA_BOOTSTRAP"
        return ConfigError(f"the certificate of {place} cannot be trusted; check {what}: {reason}")
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"the TLS handshake with {place} failed; check LORAQ_KAFKA_SECURITY_PROTOCOL: {reason}")
    if isinstance(error, _FORBIDDEN):
        return ConfigError(f"{place} denied access to this user; check its ACLs: {reason}")
    if isinstance(error, MessageSizeTooLargeError):
        return InputError(f"the record is larger than {place} accepts; make it smaller: {reason}")
    protocol = settings.kafka_security_protocol
    return RetryableError(
        f"the request to {place} failed; check that it runs, LORAQ_KAFKA_BOOTSTRAP"
        f" and LORAQ_KAFKA_SECURITY_PROTOCOL={protocol}: {reason}"
    )


@contextmanager
def errors_translated(settings: Settings) -> Iterator[None]:
    """Translates Kafka's errors raised in the block."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise translated(error, settings) from error


@contextmanager
def starting(settings: Settings) -> Iterator[None]:
    """`errors_translated` for the start of a client, with the underlying reason if no broker can be used.

    If several brokers failed, one that refused the client is more informative than one that is unreachable.
    """
    attempt = _Attempt()
    token = _attempt.set(attempt)
    try:
        yield
    except (KafkaError, OSError) as error:
        conclusive = [reason for reason in attempt.reasons if isinstance(reason, _CONCLUSIVE)]
        cause = next(iter([*conclusive, *attempt.reasons]), error)
        raise translated(cause, settings) from error
    else:
        for reason in attempt.reasons:
            _log.warning("A broker could not be used", action="broker_unusable", reason=str(reason))
    finally:
        attempt.over = True
        _attempt.reset(token)
