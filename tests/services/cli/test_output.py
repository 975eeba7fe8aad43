"""How commands print text that tenants wrote, and which durations they accept."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.output import DURATION_S, cell, print_fields, print_rows, visible


def test_control_characters_that_a_tenant_wrote_are_escaped() -> None:
    assert cell("\x1b]0;title\x07\x1b[2J\x7f\x9b\r") == "␛]0;title␇␛[2J␡\\u009b␍"
    assert cell("abc\u202e") == "abc\\u202e"
    assert cell(["\x1b[0m", 1]) == "␛[0m 1"
    assert cell("tab\tline\nümläut 😀") == "tab\tline\nümläut 😀"


def test_structures_are_shown_as_json() -> None:
    assert cell({"ok": True, "none": None, "ä": "\x1b"}) == '{"ok": true, "none": null, "ä": "\\u001b"}'
    assert cell([{"name": "a", "value": None}]) == '[{"name": "a", "value": null}]'


def test_a_column_has_the_name_of_its_field_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"job_id": "j", "next_attempt_at": None}
    print_rows([row], tuple(row), "")
    assert capsys.readouterr().out.split() == ["job_id", "next_attempt_at", "j", "-"]
    print_fields(row)
    assert capsys.readouterr().out.split() == ["job_id", "j", "next_attempt_at", "-"]


@given(st.text())
def test_printable_text_is_unchanged(text: str) -> None:
    shown = visible(text)
    assert visible(shown) == shown
    assert all(character.isprintable() or character in "\t\n" for character in shown if ord(character) < 0xA0)


def test_a_duration_is_a_number_within_bounds() -> None:
    assert DURATION_S.convert("0.5", None, None) == 0.5
    for text in ("nan", "inf", "-1", "9999999", "soon"):
        with pytest.raises(click.BadParameter, match=text):
            DURATION_S.convert(text, None, None)
