"""Data that crosses a boundary: messages, rows and webhook payloads. No I/O, no torch."""
