"""Delays before a job's next attempt and before it checks for its adapter again. Pure policy."""

MAX_RETRY_DELAY_S = 60.0
MAX_RECHECK_S = 30.0


def retry_delay_s(attempts: int, first_s: float) -> float:
    """Delay in seconds after the given number of attempts: doubled each time, at most a minute."""
    assert attempts >= 1, "a retry follows an attempt"
    return float(min(first_s * 2.0 ** min(attempts - 1, 30), MAX_RETRY_DELAY_S))


def recheck_delay_s(cold_for_s: float, bound_s: float) -> float:
    """Delay in seconds before a job checks for its adapter again: as long as its wait so far, within `bound_s`."""
    left_s = max(bound_s - cold_for_s, 0.0)
    return min(max(cold_for_s, 1.0), MAX_RECHECK_S, left_s)
