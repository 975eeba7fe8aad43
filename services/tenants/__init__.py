"""Tenants and their secrets: adding, listing, encrypting. Knows no adapter, job or webhook."""
