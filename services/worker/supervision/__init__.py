"""What watches a running worker: leases, breaker, progress. Nothing else in the worker imports it but the wiring."""
