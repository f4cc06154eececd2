"""`ratchet explain`: a rollout, a step or a run in a few plain sentences."""

from typing import Annotated

import typer

from ratchet.bounded_numbers import MAX_ROWS


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A rollout's id or workflow id, RUN@STEP, or RUN; by default the newest run.", metavar="[WHAT]"
        ),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="Of a run: where its hours went, and which setting would change it most.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, max=MAX_ROWS, help="--advice looks at so many of the newest trained steps.")
    ] = 20,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say why a rollout has its reward, what a step trained, or how a run is doing.

    Everything is computed from what the store has. --advice also says what a trained token costs.
    """
    import textwrap

    from cli.advice import print_advice
    from cli.console import print_json
    from client import Client
    from reads.explanations import explain_thing

    client = Client()
    if advice:
        found = client.run(what).advise(steps).as_json()
        print_json(found) if json else print_advice(found)
        return
    thing = what or client.run().run_id
    sentences = Client().read(lambda connection: explain_thing(connection, thing))
    if json:
        print_json(sentences)
        return
    for sentence in sentences:
        print(textwrap.fill(sentence, 79, subsequent_indent="  "))
