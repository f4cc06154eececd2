"""The text of a policy cannot control the terminal."""

from cli.chat import _printable


def test_control_characters_are_replaced_and_lines_stay() -> None:
    said = "a\tb\nc \N{GREEK SMALL LETTER PI} \x1b]0;title\x07\x1b[31mred\r\x9b"
    assert _printable(said, is_dim=False) == "a\tb\nc \N{GREEK SMALL LETTER PI} ?]0;title??[31mred??".replace(
        "?", "\N{REPLACEMENT CHARACTER}"
    )


def test_thoughts_are_dim_and_clean() -> None:
    assert _printable("so\x1b[0m", is_dim=True) == "\x1b[2mso\N{REPLACEMENT CHARACTER}[0m\x1b[0m"
