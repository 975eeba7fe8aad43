"""Tenants and their secrets: adding, listing, sealing. Knows no adapter, job or webhook."""
