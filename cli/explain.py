"""`ratchet explain`: a rollout, a step or a run in a few plain sentences."""

from typing import Annotated

import typer


def explain(
    what: Annotated[str, typer.Argument(help="A rollout's id or workflow id, RUN@STEP, or RUN.", metavar="WHAT")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say why a rollout has its reward, what a step trained, or how a run is doing."""
    import textwrap

    from cli.console import print_json
    from cli.store_access import query
    from client.explanations import explain_thing
    from ratchet.errors import ConfigError

    sentences = query(lambda connection: explain_thing(connection, what))
    if sentences is None:
        raise ConfigError(f"there is no rollout, step or run {what!r}; `ratchet runs` and `ratchet rollouts` list them")
    if json:
        print_json(sentences)
        return
    for sentence in sentences:
        print(textwrap.fill(sentence, 79, subsequent_indent="  "))
