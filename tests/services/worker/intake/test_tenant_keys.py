"""Producer keys in a worker: a damaged one affects only its tenant."""

import os
from collections.abc import Collection

import pytest
from pydantic import SecretStr

from services.errors import ConfigError
from services.tenants.secrets import SecretBox, new_secret_key
from services.worker.intake.records import TenantKey
from services.worker.intake.tenant_keys import TenantKeys
from services.worker.store.jobs import Tenant


class Store:
    """Tenants by name with their encrypted keys."""

    def __init__(self, **encrypted: bytes) -> None:
        self.encrypted = encrypted

    async def tenants(self, names: Collection[str]) -> dict[str, Tenant]:
        return {name: Tenant(encrypted, disabled=False) for name, encrypted in self.encrypted.items() if name in names}

    async def producer_keys(self) -> list[bytes]:
        return list(self.encrypted.values())


def keys_of(store: Store, box: SecretBox | None) -> TenantKeys:
    return TenantKeys(store, box)  # type: ignore[arg-type]  # a fake of what is used


def new_box() -> SecretBox:
    return SecretBox(SecretStr(new_secret_key()))


async def test_a_damaged_key_affects_only_its_tenant_until_it_is_restored() -> None:
    box = new_box()
    store = Store(acme=os.urandom(60), globex=box.seal(b"theirs"), empty=b"")
    keys = keys_of(store, box)
    assert await keys.of({"acme", "empty"}) == dict.fromkeys(("acme", "empty"), TenantKey(None, disabled=False))
    both = await keys.of({"acme", "globex", "nobody"})
    assert both == {"acme": TenantKey(None, disabled=False), "globex": TenantKey(b"theirs", disabled=False)}
    store.encrypted["acme"] = box.seal(b"ours")
    assert await keys.of({"acme"}) == {"acme": TenantKey(b"ours", disabled=False)}


async def test_if_no_key_can_be_decrypted_the_secret_key_is_wrong() -> None:
    theirs = new_box()
    keys = keys_of(Store(acme=theirs.seal(b"one"), globex=theirs.seal(b"two")), new_box())
    with pytest.raises(
        ConfigError, match=r"no producer key can be decrypted, for example that of tenant 'acme'.*LORAQ_SECRET_KEY"
    ):
        await keys.of({"acme"})


async def test_without_required_signatures_keys_are_not_decrypted() -> None:
    assert await keys_of(Store(acme=b"damaged"), None).of({"acme"}) == {"acme": TenantKey(b"", disabled=False)}
