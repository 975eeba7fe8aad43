"""The embedded stack of `loraq up`: broker, PostgreSQL and an S3-compatible store, from pip wheels."""
