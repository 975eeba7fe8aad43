"""Forward-only migrations in plain SQL."""
