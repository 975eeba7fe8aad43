"""Which offset of each partition to commit, and when. Independent of jobs; all but `positions` is pure."""
