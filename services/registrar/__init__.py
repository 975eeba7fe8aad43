"""The registrar process: admits or rejects every pushed adapter. Loads no weights and runs no job."""
