"""`loraq up` and `loraq down`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from services.localstack.config import ServerName
from services.localstack.stack import Stack
from services.localstack.up import UpOptions, run_up
from services.process.settings import default_cache_dir

DEFAULT_DIR = Path(".loraq")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

directory_option: Decorator = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIR,
    show_default=True,
    help="Directory of the stack's data, logs and settings.",
)


def port_option(server: ServerName) -> Decorator:
    """`--<server>-port`."""
    text = f"Port of {server}; by default a free one. Later runs use the same port."
    return click.option(f"--{server}-port", type=click.IntRange(1, 65535), help=text)


@click.command()
@directory_option
@port_option("broker")
@port_option("postgres")
@port_option("s3")
@click.option(
    "--base-model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    envvar="LORAQ_BASE_MODEL",
    help="Hugging Face directory of a Llama-family model, instead of the embedded SmolLM2.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="LORAQ_CACHE_DIR",
    default=default_cache_dir,
    show_default="~/.cache/loraq",
    help="Directory for the converted base model.",
)
@click.option("--lifetime-of", type=int, metavar="PID", help="Stop the stack when the process with this id ends.")
@click.option("--foreground", is_flag=True, help="Keep running, and stop the stack on Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the stack's settings as one JSON object on stdout.")
def up(broker_port: int | None, postgres_port: int | None, s3_port: int | None, **options: Any) -> None:
    """Start the embedded stack: a Kafka-compatible broker, PostgreSQL and an S3-compatible store.

    Also creates the schema, the topics, the bucket and the base model, and writes the settings to DIR/stack.env. If the
    stack is already running, it only restarts the servers that have died.
    """
    wanted: dict[ServerName, int | None] = {"broker": broker_port, "postgres": postgres_port, "s3": s3_port}
    ports = {server: port for server, port in wanted.items() if port is not None}
    run_up(UpOptions(ports=ports, **options))


@click.command()
@directory_option
@click.option("--delete", is_flag=True, help="Delete the stack's data, logs and settings as well.")
def down(directory: Path, delete: bool) -> None:
    """Stop the embedded stack.

    Postgres and S3 keep their data for the next `loraq up`; the broker's records are lost. Files that the stack did not
    create, such as another stack's directory below its own, are never deleted.
    """
    stack = Stack(directory)
    if not stack.files.exist or not (delete or stack.files.contain_stack):
        click.echo(f"There is no stack in {directory}.", err=True)
        return
    if delete:
        stack.files.check_stack()
    with stack.files.exclusively():
        ended = stack.take_down()
        click.echo("The stack is down." if ended else f"No stack was running in {directory}.", err=True)
        if delete:
            click.echo(_deleted(directory, stack.files.delete()), err=True)


def _deleted(directory: Path, left: Sequence[Path]) -> str:
    if not left:
        return f"Deleted {directory}."
    names = ", ".join(str(directory / path.name) for path in left)
    return f"Deleted the stack in {directory}, but kept what it did not create: {names}."
