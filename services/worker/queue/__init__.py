"""Accepted jobs that wait: order, retry policy, parking, cancellation. Independent of the engine and of staging."""
