"""Accepted jobs that wait: order, retry policy, parking, cancellation. Knows no engine and no adapter on disk."""
