"""How many tokens of later arrivals went before each job, counted without the policy's own bookkeeping. Pure."""


class _Order:
    """The jobs of one lane and tenant in order of arrival; `oldest` is the first that still waits and counts."""

    __slots__ = ("admitted", "arrived", "most", "oldest", "passed", "place")

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.arrived = 0
        self.admitted: dict[int, float] = {}
        self.oldest = 0
        self.passed = 0.0
        self.most = 0.0

    def advance(self) -> None:
        while self.oldest in self.admitted:
            self.passed -= self.admitted.pop(self.oldest)
            self.oldest += 1


class PassedTokens:
    """Of the oldest job of each lane and tenant: no younger one was passed by more.

    A job that could not run for a while, since its adapter was not here, does not count.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[str, str], _Order] = {}

    def arrive(self, lane: str, tenant: str, job: int, *, is_open: bool) -> None:
        """A job joins the queue."""
        order = self._orders.setdefault((lane, tenant), _Order())
        order.place[job] = order.arrived
        order.arrived += 1
        if not is_open:
            self.exempt(lane, tenant, job)

    def exempt(self, lane: str, tenant: str, job: int) -> None:
        """The job does not count from now on: it cannot run."""
        order = self._orders[lane, tenant]
        order.admitted.setdefault(order.place[job], 0.0)
        order.advance()

    def admit(self, lane: str, tenant: str, job: int, tokens: float) -> None:
        """A job goes to the engine."""
        order = self._orders[lane, tenant]
        place = order.place.pop(job)
        if place < order.oldest:
            return
        if place > order.oldest:
            order.passed += tokens
            order.most = max(order.most, order.passed)
        order.admitted[place] = tokens if place > order.oldest else 0.0
        order.advance()

    def most(self) -> dict[str, float]:
        """The most tokens that any counted job was passed by, by lane."""
        most: dict[str, float] = {}
        for (lane, _), order in self._orders.items():
            most[lane] = max(most.get(lane, 0.0), order.most)
        return most
