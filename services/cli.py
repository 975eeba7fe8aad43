"""`loraq …`: the one command. Each room keeps its own commands; this module only finds them."""

import importlib
import sys
from typing import Any

import click

from services.errors import ServiceError

COMMANDS = {
    "up": "services.localstack.commands:up",
    "down": "services.localstack.commands:down",
    "migrate": "services.migrate:migrate",
    "topics": "services.provision:topics",
    "bucket": "services.provision:bucket",
    "worker": "services.worker.commands:worker",
    "dispatcher": "services.dispatcher.commands:dispatcher",
    "registrar": "services.registry.commands:registrar",
    "tenants": "services.registry.commands:tenants",
    "adapters": "services.registry.commands:adapters",
    "endpoints": "services.registry.commands:endpoints",
    "submit": "services.jobs.commands:submit",
    "jobs": "services.jobs.commands:jobs",
    "listen": "services.webhook_receiver:listen",
    "demo": "services.demo.commands:demo",
    "bench": "services.bench.commands:bench",
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs, so that `loraq --help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="loraq")
def cli() -> None:
    """Serve many LoRA adapters over one base model, as asynchronous jobs."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: exit status 0 done, 1 failed with one line on stderr, 2 usage."""
    try:
        return cli.main(args=arguments, standalone_mode=True)
    except ServiceError as error:
        print(f"loraq: {error}", file=sys.stderr)  # noqa: T201  # the one place that speaks for a failed command
        return sys.exit(1)


if __name__ == "__main__":
    main()
