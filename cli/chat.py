"""`ratchet chat`: talk with a policy, through the adapter."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cli.console import say


def chat(
    what: Annotated[
        str | None,
        typer.Argument(
            help="RUN, RUN@STEP, a config file, or with --config a model directory; by default the newest open run.",
            metavar="[WHAT]",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Run config for a model directory.")] = None,
) -> None:
    """Talk with a policy: each line is a message, and the answer is printed as it is sampled.

    The chat is a rollout by hand, whose page has its tokens. It holds a box of the config's first task, gets no reward
    and is never trained. It ends with Ctrl-D, Ctrl-C or its guard.

    Of an open run its present policy answers; of any other run, or RUN@STEP, engines that have other weights load that
    step first.
    """
    from client.chat import Chat, served_config
    from client.session import Client, run_blocking

    client = Client()
    name = what or client.run().run_id
    served = run_blocking(served_config(client.stack, name, config, client.by, say))
    prompt = "> " if sys.stdin.isatty() else ""
    with Chat(client, served, say) as talk, suppress(EOFError):
        say(f"rollout {talk.rollout_id}; /new begins another conversation, Ctrl-D ends the chat")
        while True:
            text = input(prompt).strip()
            if text == "/new":
                talk.messages = []
            elif text:
                try:
                    for piece in talk.send(text):
                        print(_printable(piece.text, is_dim=piece.is_thought and bool(prompt)), end="", flush=True)
                except ValueError as error:
                    say(str(error))
                print()


def _printable(text: str, is_dim: bool) -> str:
    """Return the text without characters that could control the terminal: a policy may say anything."""
    plain = "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
    return typer.style(plain, dim=True) if is_dim else plain
