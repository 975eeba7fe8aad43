"""One attempt: a signed POST and its result. A receiver's behaviour is never an exception."""

import asyncio
import os
from datetime import datetime
from importlib.metadata import version

import aiohttp

from services.process import telemetry
from services.webhooks.guard import AddressGuard, AddressNotAllowedError, parse_url
from services.webhooks.outcome import AttemptResult, NotAllowed, Responded, Unreachable, Unsendable
from services.webhooks.signature import sign

MAX_RESPONSE_BYTES = 16 * 1024
RESPONSE_BODY_TIMEOUT_S = 1.0


class Sender:
    """Sends webhooks through `session`, which must be one of `guarded_session`."""

    def __init__(self, session: aiohttp.ClientSession, guard: AddressGuard, timeout_s: float) -> None:
        self._session = session
        self._guard = guard
        self._timeout_s = timeout_s
        self._user_agent = f"loraq/{version('loraq')}"

    async def send(self, target: str, webhook_id: str, body: bytes, secret: str, now: datetime) -> AttemptResult:
        """POST `body` to `target`, signed at `now`; raises SecretError if the secret is malformed."""
        url = parse_url(target)
        if isinstance(url, Unsendable):
            return url
        if (refused := self._guard.refuse(url)) is not None:
            return refused
        headers = self._headers() | sign(secret, webhook_id, now, body)
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                await _drain(response)
                return Responded(response.status, response.headers.get("Retry-After"))
        except AddressNotAllowedError as error:
            return NotAllowed(error.address)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return explain(error, self._timeout_s)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": self._user_agent}
        if traceparent := telemetry.current_traceparent():
            headers[telemetry.TRACEPARENT_HEADER] = traceparent
        return headers


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read a short response body to its end, so that the connection can be reused.

    A body that is long, slow or malformed costs the connection only: the status alone decides.
    """
    try:
        async with asyncio.timeout(RESPONSE_BODY_TIMEOUT_S):
            left = MAX_RESPONSE_BYTES
            while left > 0 and (chunk := await response.content.read(left)):
                left -= len(chunk)
    except (aiohttp.ClientError, OSError, ValueError):
        left = 0
    if left <= 0:
        response.close()


def explain(error: aiohttp.ClientError | OSError | ValueError, timeout_s: float) -> AttemptResult:
    """The result of a failed attempt. The tenant reads the reason, so it names no address inside the network."""
    match error:
        case TimeoutError():
            return Unreachable(f"no response within {timeout_s:g} s", timed_out=True)
        case aiohttp.InvalidURL():
            return Unsendable("the URL is malformed")
        case aiohttp.ClientConnectorCertificateError():
            return Unreachable("the TLS certificate is not valid for this host")
        case aiohttp.ClientSSLError():
            return Unreachable("the TLS handshake failed")
        case aiohttp.ClientConnectorDNSError():
            return Unreachable("the host name could not be resolved")
        case aiohttp.ClientConnectorError():
            return Unreachable(f"could not connect: {_cause(error.os_error)}")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | ConnectionError():
            return Unreachable("the connection was closed before a response")
        case _:
            return Unreachable("the response is not valid HTTP")


def _cause(error: OSError) -> str:
    """The text of the error number; the error's own text would name the address."""
    return os.strerror(error.errno) if error.errno else "no address accepted the connection"
