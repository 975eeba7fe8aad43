"""Parses and validates input: addresses, names, NAME=VALUE, pydantic's errors. Pure."""
