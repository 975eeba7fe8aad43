"""Fair shares between the tenants of a lane, in tokens: deficit round robin. Pure policy.

    credit of tenant t = min(Q, what it had + Q per round since) - tokens served / weight of t
    a tenant may be served while its credit is above 0; a round begins when no tenant that could be served has any

So over any interval in which tenants f and g could always be served, their normalized service differs by at most
2 (Q + C): both were granted Q in each of the same rounds, and a credit stays between -C and Q, where C is the largest
charge of one job divided by its tenant's weight. A tenant that returns after a pause has at most Q: credit is not
hoarded, debt is paid back at Q per round. The form is that of Shreedhar and Varghese, "Efficient fair queuing using
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
    """Credits by tenant. Only tenants that are not at their full credit take memory."""

    def __init__(self, quantum: float, weight_of: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        assert quantum > 0
        self.quantum = quantum
        self._weight_of = weight_of
        self._accounts: dict[str, _Account] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def credit(self, tenant: str) -> float:
        """Tokens per unit of weight that the tenant may still be served in this round; at most a quantum."""
        account = self._accounts.get(tenant)
        if account is None:
            return self.quantum
        if account.round != self._round:
            account.credit = min(self.quantum, account.credit + (self._round - account.round) * self.quantum)
            account.round = self._round
        return account.credit

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant is served; a negative number gives back what was charged too much."""
        credit = min(self.quantum, self.credit(tenant) - tokens / self._weight_of(tenant))
        if credit == self.quantum:
            self._accounts.pop(tenant, None)
        else:
            self._accounts[tenant] = _Account(credit, self._round)

    def next_round(self, servable: Iterable[str]) -> None:
        """Begin as many rounds as the tenant of these that is nearest to credit needs; at least one."""
        least = max(map(self.credit, servable), default=0.0)
        self._round += max(1, math.floor(-least / self.quantum) + 1)

    def forget_full(self) -> None:
        """Drop the accounts of tenants that have their full credit again."""
        for tenant in [tenant for tenant in self._accounts if self.credit(tenant) >= self.quantum]:
            del self._accounts[tenant]
