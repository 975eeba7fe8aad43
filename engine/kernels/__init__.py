"""Operators; reference.py holds the fp32 truth of each."""
