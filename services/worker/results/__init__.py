"""Writes outcomes as rows, metrics and spans, then finishes their offsets. Called by the worker only."""
