"""Fair shares between the tenants of a lane, in tokens: deficit round robin. Pure policy.

    credit of tenant t = min(Q, what it had + Q per round since) - tokens served / weight of t
    a tenant may be served while its credit is above 0; a round begins when no tenant that could be served has any

Over any interval in which tenants f and g could always be served, their normalized service differs by at most
2 (Q + C). Each round grants Q to both, and a credit stays between -C and Q, where C is the largest charge of one job
divided by its tenant's weight. An idle tenant does not accumulate credit: it has at most Q when it returns. Debt is
repaid at Q per round. The algorithm is from Shreedhar and Varghese, "Efficient fair queuing using
deficit round robin" (SIGCOMM 1995); the order inside a round is free, as in "Locality-aware fair scheduling in LLM
serving" (Cao et al., 2025), and serves affinity.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    credit: float
    round: int


class Shares:
    """Credit by tenant. Tenants with full credit use no memory."""

    def __init__(self, quantum: float, weight_of: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        assert quantum > 0
        self.quantum = quantum
        self._weight_of = weight_of
        self._accounts: dict[str, _Account] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def credit(self, tenant: str) -> float:
        """The tenant's remaining credit in this round, in tokens per unit of weight; at most one quantum."""
        account = self._accounts.get(tenant)
        if account is None:
            return self.quantum
        if account.round != self._round:
            account.credit = min(self.quantum, account.credit + (self._round - account.round) * self.quantum)
            account.round = self._round
        return account.credit

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant; a negative number refunds it."""
        credit = min(self.quantum, self.credit(tenant) - tokens / self._weight_of(tenant))
        if credit == self.quantum:
            self._accounts.pop(tenant, None)
        else:
            self._accounts[tenant] = _Account(credit, self._round)

    def next_round(self, servable: Iterable[str]) -> None:
        """Begin as many rounds as it takes until one of these tenants has credit; at least one."""
        least = max(map(self.credit, servable), default=0.0)
        self._round += max(1, math.floor(-least / self.quantum) + 1)

    def forget_full(self) -> None:
        """Drop the accounts of tenants whose credit is full again."""
        for tenant in [tenant for tenant in self._accounts if self.credit(tenant) >= self.quantum]:
            del self._accounts[tenant]
