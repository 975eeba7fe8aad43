"""Batches of rows passed to a statement as one array per column, so that any batch is one round trip."""

from collections.abc import Mapping

JOB = {"tenant": "text", "job_id": "uuid"}
DATED = {"accepted_on": "date", **JOB}
ATTEMPT = {**DATED, "fence": "bigint"}


def batch(alias: str, columns: Mapping[str, str], *, first: int = 1, numbered: bool = False) -> str:
    """SQL of a relation over the parameters from `$first` on; `columns` maps names to types, in parameter order.

    With `numbered` a last column, `place`, numbers the rows from 1. The sub-selects hide the array lengths from the
    planner, which then assumes 10 rows. With the real length, hundreds, it costs that many index lookups in every
    partition, although all but one partition are pruned. It then scans a whole partition when its statistics say that
    few rows match, as they do if no job was waiting at the last ANALYZE.
    """
    arrays = ", ".join(f"(select ${number}::{kind}[])" for number, kind in enumerate(columns.values(), start=first))
    names = ", ".join((*columns, "place") if numbered else columns)
    return f"unnest({arrays}){' with ordinality' if numbered else ''} as {alias} ({names})"
