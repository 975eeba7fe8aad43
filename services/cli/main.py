"""`loraq …`: the entry point. Each package defines its own commands; this module finds them."""

import importlib
import os
import sys
from typing import Any

import click

from services.errors import ServiceError

COMMANDS = {
    "up": ("services.localstack.commands:up", "Start the embedded stack: broker, PostgreSQL, S3."),
    "down": ("services.localstack.commands:down", "Stop the embedded stack."),
    "migrate": ("services.postgres.migrate:migrate", "Migrate the database to this version's schema."),
    "topics": ("services.cli.provision:topics", "Create the pool's missing topics."),
    "bucket": ("services.cli.provision:bucket", "Create the bucket if it is missing."),
    "worker": ("services.worker.commands:worker", "Process: run jobs on the engine."),
    "dispatcher": ("services.dispatcher.commands:dispatcher", "Process: send webhooks and events."),
    "registrar": ("services.registrar.commands:registrar", "Process: admit pushed adapters."),
    "tenants": ("services.tenants.commands:tenants", "Add and list tenants."),
    "adapters": ("services.adapters.commands:adapters", "Push adapters; decide which are served."),
    "webhooks": ("services.webhooks.commands:webhooks", "List undelivered webhooks; send them again."),
    "endpoints": ("services.webhooks.endpoint_commands:endpoints", "Register addresses for webhooks."),
    "workers": ("services.routing.commands:workers", "List workers, their load and their adapters."),
    "submit": ("services.jobs.commands:submit", "Submit one job, or a file of them."),
    "jobs": ("services.jobs.commands:jobs", "Show jobs and their outputs; cancel, replay."),
    "dlq": ("services.dlq.commands:dlq", "List dead letters and send them back."),
    "listen": ("services.webhooks.receiver:listen", "Receive, verify and print webhooks."),
    "demo": ("services.demo.commands:demo", "Show the whole product on this machine."),
    "bench": ("services.bench.commands:bench", "Measure speed on this machine."),
    "simulate": ("services.simulate.commands:simulate", "Compare queue policies in simulated time."),
}


NEED_NO_STACK = ("up", "down", "demo")
LOG_THEMSELVES = ("worker", "dispatcher", "registrar")


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs, so that `loraq --help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="loraq")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve many LoRA adapters over one base model, as asynchronous jobs.

    Settings are LORAQ_… variables, read from the environment and from .env and .loraq/stack.env (written by `loraq up`)
    in the working directory. docs/configuration.md lists them.
    """
    if context.invoked_subcommand not in LOG_THEMSELVES:
        from services.process.environment import unknown_variables  # slow to import; `--help` does not need it

        if (warning := unknown_variables(os.environ)) is not None:
            click.echo(f"loraq: {warning}", err=True)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit status: 0 success, 1 failure with one line on stderr, 2 wrong usage."""
    try:
        return cli.main(args=arguments, standalone_mode=True)
    except ServiceError as error:
        from services.process.settings import hint_without_stack  # slow to import; `--help` does not need it

        command = next(iter(sys.argv[1:] if arguments is None else arguments), None)
        hint = None if command in NEED_NO_STACK else hint_without_stack(error)
        print(f"loraq: {error}{f'; {hint}' if hint else ''}", file=sys.stderr)  # noqa: T201  # the only place that prints a command's error
        return sys.exit(1)


if __name__ == "__main__":
    main()
