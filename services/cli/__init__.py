"""`loraq …`: the command line. It finds each package's commands and shares their output; nothing imports `main`."""
