"""Postgres: the pool, its codecs, error translation and migrations. Other packages keep their own statements."""
