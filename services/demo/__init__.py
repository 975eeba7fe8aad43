"""`loraq demo`: runs the whole product in one directory, on real servers and a real model."""
