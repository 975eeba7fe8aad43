"""The worker's rows in Postgres: statements, the rows they write, retries. Neither starts nor stops jobs."""
