"""Submitting jobs and looking at them, from the command line."""
