"""`loraq demo`: the whole product at work in one directory, on real servers and a real model."""
