"""`ratchet show rollout`: print one rollout, from its boxes to its verdict."""

from typing import Annotated, Any

import typer
from rich.console import Console

from cli.console import answered_by, print_json, print_table
from stack.parts import Stack


def rollout(
    name: Annotated[str, typer.Argument(help="The rollout's id or workflow id.", metavar="ROLLOUT")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show one rollout: attempts, turns, patch, grade log, boxes; of an open one also what its stage does now."""
    from client import Client
    from client.session import run_blocking
    from stack.run_status import describe_work

    story = Client().rollout(name)
    if story["rollout"]["outcome"] is None:
        story["now"] = run_blocking(describe_work(Stack(), story["rollout"]["workflow_id"]))
    if json:
        print_json(story)
    else:
        _print(story)


def _print(story: dict[str, Any]) -> None:
    console = Console()
    head = story["rollout"]
    console.print(
        f"[bold]{head['workflow_id']}[/]  task {head['task']}  harness {head['harness']}  T={head['temperature']:g}"
    )
    console.print(
        f"outcome {head['outcome'] or 'open'}  reward {head['reward']}  exit {head['agent_exit']}  "
        f"({head['outcome_reason']})"
    )
    for told in story.get("now", []):
        console.print(f"now  {told}", markup=False, highlight=False)
    if head["endpoint"] is not None:
        console.print(answered_by(head["endpoint"]))
    console.print("seconds  " + "  ".join(f"{stage} {used:.1f}" for stage, used in head["timings"].items()))
    turns = [
        [
            str(turn["id"]),
            turn["state"],
            turn["kind"],
            turn["fork_cause"] or "",
            f"{turn['prompt_tokens']} → {turn['num_sampled']}",
            turn["finish_reason"] or "",
            ", ".join(sorted({span["version"] or "?" for span in turn["version_spans"] or []})),
        ]
        for turn in story["turns"]
    ]
    if head["num_turns"] and not turns:
        console.print(f"its turns and logs are archived: archive/{head['run_id']} of the state directory")
    print_table("turns", ["id", "state", "kind", "fork", "tokens", "finish", "policy version"], turns)
    boxes = [
        [str(box["id"]), box["role"], str(box["attempt"]), box["state"], box["release_reason"]]
        for box in story["boxes"]
    ]
    print_table("boxes", ["id", "role", "attempt", "state", "why released"], boxes)
    print_table("verdicts", ["id", "grader", "verdict", "oracle", "control runs", "flags"], _verdicts(story["grades"]))
    for title, rows, column in (
        ("transcript", story["attempts"], "transcript"),
        ("patch", story["patches"], "diff"),
        ("grade log", story["grades"], "log"),
    ):
        for row in rows:
            console.rule(title, align="left")
            empty = f"empty: {story['why_empty']}" if story["why_empty"] and row is rows[-1] else "empty"
            why = (row["reason"] or empty) if title == "patch" else "empty"
            console.print(row[column] or f"({why})", markup=False, highlight=False)


def _verdicts(grades: list[dict[str, Any]]) -> list[list[str]]:
    from reads.reward_explanation import control_words

    return [
        [
            str(grade["id"]),
            f"{grade['grader']} {grade['grader_version']}",
            "rejected" if grade["rejected"] else "solved" if grade["solved"] else "not solved",
            "compared" if grade["has_oracle"] else "not compared",
            "; ".join(control_words(grade["control"] or [])) or "none",
            ", ".join(sorted({flag["what"] for flag in grade["flags"]})),
        ]
        for grade in grades
    ]
