"""The worker's rows in Postgres: statements, what is written, retries of database work. Starts and stops no job."""
