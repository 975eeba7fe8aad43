"""Supervision of a running worker: leases, breaker, progress. Imported only by the composition root."""
