"""Postgres: the pool, its codecs, error translation and migrations. Owns no statement of any other room."""
