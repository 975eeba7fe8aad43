"""Which offset of each partition may be committed, and when. Knows no job; `ledger`, `finished`, `commits` are pure."""
