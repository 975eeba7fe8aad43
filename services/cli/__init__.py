"""`loraq …`: the command line. It finds the rooms' commands and gives them shared output; no room imports `main`."""
