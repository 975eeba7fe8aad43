"""`loraq dlq`: lists and shows dead letters, and replays them, edited if necessary."""
