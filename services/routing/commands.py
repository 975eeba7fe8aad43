"""`loraq workers`."""

import time

import click

from services.cli.output import json_option, on_database, print_json, print_rows
from services.routing import status

WORKER_COLUMNS = (
    "pool",
    "worker",
    "age_s",
    "state",
    "lanes",
    "partitions",
    "running",
    "waiting",
    "tokens_per_s",
    "device_adapters",
    "host_adapters",
    "disk_adapters",
)
CLEAR = "\x1b[H\x1b[2J"


@click.command()
@click.option("--pool", help="Only the workers of this pool.")
@click.option("--watch", "every_s", type=click.FloatRange(0.1, 3600), metavar="SECONDS", help="Repeat until Ctrl-C.")
@json_option
def workers(pool: str | None, every_s: float | None, as_json: bool) -> None:
    """List the workers that have reported within the last minute: load, and adapters by their fastest tier."""
    while True:
        rows = on_database(lambda connection: status.list_workers(connection, pool))
        if every_s is not None and not as_json:
            click.echo(CLEAR, nl=False)
        if as_json:
            for row in rows:
                print_json(row)
        else:
            print_rows(rows, WORKER_COLUMNS, "No worker has reported within the last minute.")
        if every_s is None:
            return
        time.sleep(every_s)
