"""Adapters: reading PEFT directories, and the segments that one step applies."""
