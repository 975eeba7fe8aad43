"""Credit: a tenant's quantum per round, its debt, and no accumulation while idle."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.queue.shares import Shares


def test_debt_is_repaid_a_quantum_per_round() -> None:
    shares = Shares(10.0)
    shares.charge("acme", 25)
    assert shares.credit("acme") == -15
    shares.next_round(["acme"])
    assert shares.credit("acme") == 5, "as many rounds as it takes to be served again"


def test_an_idle_tenant_accumulates_no_credit() -> None:
    shares = Shares(10.0)
    shares.charge("acme", 4)
    for _ in range(100):
        shares.charge("globex", 12)
        shares.next_round(["globex"])
    assert shares.credit("acme") == 10


def test_a_heavier_tenant_is_charged_less() -> None:
    shares = Shares(10.0, {"acme": 2.0}.__getitem__)
    shares.charge("acme", 10)
    assert shares.credit("acme") == 5


def test_tenants_with_full_credit_use_no_memory() -> None:
    shares = Shares(10.0)
    for number in range(100):
        shares.charge(f"tenant {number}", 5)
    shares.charge("acme", 11)
    shares.next_round(["acme"])
    shares.forget_full()
    assert len(shares) == 1
    shares.charge("acme", 0)
    shares.charge("globex", 3)
    shares.charge("globex", -3)
    assert len(shares) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 40)), max_size=60), st.integers(1, 20))
def test_a_round_gives_some_tenant_credit_and_none_more_than_a_quantum(
    charges: list[tuple[str, int]], quantum: int
) -> None:
    shares = Shares(quantum)
    for tenant, tokens in charges:
        shares.charge(tenant, tokens)
        credits_now = {each: shares.credit(each) for each in "abc"}
        assert max(credits_now.values()) <= quantum
        if max(credits_now.values()) <= 0:
            shares.next_round("abc")
            assert max(map(shares.credit, "abc")) > 0
