"""Tenants' producer keys as a worker uses them: a damaged one costs its tenant alone, a wrong secret key stops all."""

from collections.abc import Sequence

from services.errors import ConfigError
from services.process import telemetry
from services.tenants.secrets import SecretBox
from services.worker.intake.records import TenantKey
from services.worker.store.jobs import JobStore, Tenant

_log = telemetry.get_logger()


class TenantKeys:
    """Producer keys of tenants, opened once per sealed form. Without a box they stay closed."""

    def __init__(self, store: JobStore, box: SecretBox | None) -> None:
        self._store = store
        self._box = box
        self._opened: dict[bytes, bytes] = {}
        self._damaged: set[bytes] = set()

    async def of(self, names: set[str]) -> dict[str, TenantKey]:
        """The named tenants that exist. Raises ConfigError where LORAQ_SECRET_KEY opens nobody's key."""
        tenants = await self._store.tenants(names)
        if self._box is None:
            return {name: TenantKey(b"", each.disabled) for name, each in tenants.items()}
        for name, each in tenants.items():
            await self._open(self._box, name, each)
        return {name: TenantKey(self._opened.get(each.producer_key), each.disabled) for name, each in tenants.items()}

    async def _open(self, box: SecretBox, name: str, tenant: Tenant) -> None:
        sealed = tenant.producer_key
        if sealed in self._opened or sealed in self._damaged:
            return
        try:
            self._opened[sealed] = box.open(sealed)
        except ConfigError as error:
            if not self._opened and not self._opens_any(box, await self._store.producer_keys()):
                raise ConfigError(
                    f"no tenant's producer key can be opened, that of {name!r} for one: {error}"
                ) from error
            self._damaged.add(sealed)
            telemetry.alarm(
                _log, "Producer key unusable", action="producer_key_unusable", tenant=name, reason=str(error)
            )

    def _opens_any(self, box: SecretBox, keys: Sequence[bytes]) -> bool:
        """Whether the box opens one of the keys at least, so that one that it does not open is damaged."""
        for sealed in keys:
            try:
                self._opened[sealed] = box.open(sealed)
            except ConfigError:
                continue
            return True
        return False
