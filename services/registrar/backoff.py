"""When to retry an adapter whose files could not be fetched. Pure: `now` is an argument, in seconds."""

from dataclasses import dataclass, field

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


@dataclass
class Backoff:
    """Per key, a delay that doubles with each failure up to a minute."""

    _delays_s: dict[str, float] = field(default_factory=dict)
    _due_at: dict[str, float] = field(default_factory=dict)

    def failed(self, key: str, now: float) -> float:
        """Record a failure; returns the seconds until the key is due again."""
        delay_s = min(2 * self._delays_s[key], LONGEST_DELAY_S) if key in self._delays_s else FIRST_DELAY_S
        self._delays_s[key], self._due_at[key] = delay_s, now + delay_s
        return delay_s

    def settled(self, key: str) -> None:
        """Forget a key whose adapter was admitted or rejected."""
        self._delays_s.pop(key, None)
        self._due_at.pop(key, None)

    def waiting(self, now: float) -> list[str]:
        """The keys that are not due yet."""
        return [key for key, due_at in self._due_at.items() if due_at > now]
