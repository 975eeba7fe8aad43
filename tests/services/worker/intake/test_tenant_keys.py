"""Producer keys as a worker uses them: one that is damaged costs its tenant alone."""

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
    """Tenants by name with their sealed keys."""

    def __init__(self, **sealed: bytes) -> None:
        self.sealed = sealed

    async def tenants(self, names: Collection[str]) -> dict[str, Tenant]:
        return {name: Tenant(sealed, disabled=False) for name, sealed in self.sealed.items() if name in names}

    async def producer_keys(self) -> list[bytes]:
        return list(self.sealed.values())


def keys_of(store: Store, box: SecretBox | None) -> TenantKeys:
    return TenantKeys(store, box)  # type: ignore[arg-type]  # a fake of what is used


def new_box() -> SecretBox:
    return SecretBox(SecretStr(new_secret_key()))


async def test_a_damaged_key_costs_its_tenant_alone_until_it_is_restored() -> None:
    box = new_box()
    store = Store(acme=os.urandom(60), globex=box.seal(b"theirs"), empty=b"")
    keys = keys_of(store, box)
    assert await keys.of({"acme", "empty"}) == dict.fromkeys(("acme", "empty"), TenantKey(None, disabled=False))
    both = await keys.of({"acme", "globex", "nobody"})
    assert both == {"acme": TenantKey(None, disabled=False), "globex": TenantKey(b"theirs", disabled=False)}
    store.sealed["acme"] = box.seal(b"ours")
    assert await keys.of({"acme"}) == {"acme": TenantKey(b"ours", disabled=False)}


async def test_where_nobodys_key_can_be_opened_the_secret_key_is_at_fault() -> None:
    theirs = new_box()
    keys = keys_of(Store(acme=theirs.seal(b"one"), globex=theirs.seal(b"two")), new_box())
    with pytest.raises(
        ConfigError, match=r"no producer key can be decrypted, for example that of tenant 'acme'.*LORAQ_SECRET_KEY"
    ):
        await keys.of({"acme"})


async def test_where_no_signature_is_demanded_keys_stay_closed() -> None:
    assert await keys_of(Store(acme=b"damaged"), None).of({"acme"}) == {"acme": TenantKey(b"", disabled=False)}
