"""NAME=VALUE of options."""

from collections.abc import Iterator

import click
import pytest

from services.cli.main import cli
from services.parsing.assignments import name_and_value


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("ticket=17", ("ticket", 17)),
        ("a.b=null", ("a.b", None)),
        ("who=support", ("who", "support")),
        ("empty=", ("empty", "")),
        ('twice=a="b"', ("twice", 'a="b"')),
        ("a..b=[1]", ("a..b", [1])),
    ],
)
def test_a_value_is_json_or_else_text(text: str, pair: tuple[str, object]) -> None:
    assert name_and_value(text) == pair


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not NAME=VALUE"),
        ("=1", "is not NAME=VALUE"),
        ("a", "is not NAME=VALUE"),
        ("a=" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_an_invalid_assignment_is_reported_briefly(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        name_and_value(text)
    assert len(str(refusal.value)) < 200


def options(command: click.Command, name: str = "loraq") -> Iterator[tuple[str, click.Option]]:
    """Every option of a command and of its subcommands, with the name of its command."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield name, parameter
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from options(found, f"{name} {child}")


def test_every_command_parses_assignments_alike() -> None:
    taking = {(name, option.name): option for name, option in options(cli) if "=" in (option.metavar or "")}
    assert taking.keys() == {("loraq submit", "metadata"), ("loraq dlq replay", "sets")}
    for option in taking.values():
        assert option.type.convert('a={"b": 1}', None, None) == ("a", {"b": 1})
        with pytest.raises(click.BadParameter, match="'a' is not NAME=VALUE"):
            option.type.convert("a", None, None)
