"""Decrypts producer keys: a damaged one affects only its tenant, a wrong LORAQ_SECRET_KEY stops the worker."""

from collections.abc import Sequence

from services.errors import ConfigError
from services.process import telemetry
from services.tenants.secrets import SecretBox
from services.worker.intake.records import TenantKey
from services.worker.store.jobs import JobStore, Tenant

_log = telemetry.get_logger()


class TenantKeys:
    """Producer keys of tenants, each decrypted once; not decrypted at all without a `box`."""

    def __init__(self, store: JobStore, box: SecretBox | None) -> None:
        self._store = store
        self._box = box
        self._keys: dict[bytes, bytes] = {}
        self._damaged: set[bytes] = set()

    async def of(self, names: set[str]) -> dict[str, TenantKey]:
        """The named tenants that exist. Raises ConfigError if LORAQ_SECRET_KEY decrypts no tenant's key."""
        tenants = await self._store.tenants(names)
        if self._box is None:
            return {name: TenantKey(b"", each.disabled) for name, each in tenants.items()}
        for name, each in tenants.items():
            await self._decrypt(self._box, name, each)
        return {name: TenantKey(self._keys.get(each.producer_key), each.disabled) for name, each in tenants.items()}

    async def _decrypt(self, box: SecretBox, name: str, tenant: Tenant) -> None:
        encrypted = tenant.producer_key
        if encrypted in self._keys or encrypted in self._damaged:
            return
        try:
            self._keys[encrypted] = box.open(encrypted)
        except ConfigError as error:
            if not self._keys and not self._decrypts_any(box, await self._store.producer_keys()):
                raise ConfigError(
                    f"no producer key can be decrypted, for example that of tenant {name!r}: {error}"
                ) from error
            self._damaged.add(encrypted)
            telemetry.alarm(
                _log, "A producer key is damaged", action="producer_key_unusable", tenant=name, reason=str(error)
            )

    def _decrypts_any(self, box: SecretBox, keys: Sequence[bytes]) -> bool:
        """Whether the box decrypts any of the keys; if so, a key that it does not decrypt is damaged."""
        for encrypted in keys:
            try:
                self._keys[encrypted] = box.open(encrypted)
            except ConfigError:
                continue
            return True
        return False
