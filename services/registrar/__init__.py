"""The registrar process: gives every pushed adapter its verdict. Loads no weights and runs no job."""
