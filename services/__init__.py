"""Everything that talks to the outside: one folder per running process, plus shared plumbing."""
