"""From outcomes to committed rows, metrics and spans, and then to finished offsets. Called by the worker alone."""
