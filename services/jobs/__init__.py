"""`loraq submit` and `loraq jobs`: submit, list, show, cancel and replay jobs."""
