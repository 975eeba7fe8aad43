"""Rows that a statement gets as arrays, one for each column, so that a batch of any size is one round trip."""

from collections.abc import Mapping

JOB = {"tenant": "text", "job_id": "uuid"}
DATED = {"accepted_on": "date", **JOB}
ATTEMPT = {**DATED, "fence": "bigint"}


def batch(alias: str, columns: Mapping[str, str], *, first: int = 1, numbered: bool = False) -> str:
    """SQL of a relation made of the parameters from `$first` on, given name and type of each column in their order.

    With `numbered` a last column, `place`, counts the rows from 1. The lengths of the arrays are hidden from the
    planner, which takes 10 for each. Told of hundreds it weighs that many lookups, in every partition, although all
    but one are passed over, against reading a partition once: and it reads all of a partition for a batch where its
    statistics say that few rows would match, as they do when no job was waiting at the last ANALYZE.
    """
    arrays = ", ".join(f"(select ${number}::{kind}[])" for number, kind in enumerate(columns.values(), start=first))
    names = ", ".join((*columns, "place") if numbered else columns)
    return f"unnest({arrays}){' with ordinality' if numbered else ''} as {alias} ({names})"
