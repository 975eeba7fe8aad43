"""Tenants, their webhook endpoints and adapters; the registrar that admits adapters."""
