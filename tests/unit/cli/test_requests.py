"""Printed requests to a run: values as in a config file, in lines that fit the terminal."""

from datetime import UTC, datetime
from typing import Any

from cli.show.requests import request_lines
from ratchet.steering import describe_request

ASKED = datetime(2026, 11, 26, 2, 10, 11, tzinfo=UTC)


def request(action: str, target: str, before: Any, after: Any, reason: str = "") -> dict[str, Any]:
    asked = {"asked_at": ASKED, "asked_by": "anna@a-host-with-a-long-name.example.org", "from_step": 4}
    return {**asked, "what": describe_request(action, target, before, after), "reason": reason}


def test_values_are_as_in_a_config() -> None:
    changes = [
        (request("set", "sandbox.adaptive", False, True), "set sandbox.adaptive: false → true"),
        (request("set", "training.solve_rates", None, [0.1, 0.9]), "set training.solve_rates: null → [0.1, 0.9]"),
        (request("set", "training.solve_rates", [0.1, 0.9], None), "set training.solve_rates: [0.1, 0.9] → null"),
        (request("stop", "", "none", {"wish": "stop", "stop_at": 3}), "stop after step 3"),
        (request("pause", "", "running", "paused"), "pause: running → paused"),
        (request("evaluate", "asked1-t0", None, {"temperature": 0.0, "samples": 1}),
         "evaluate asked1-t0: {temperature: 0.0, samples: 1}"),
        (request("skip_step", "step/5", ["group/a/1"], "discarded"), "skip step 5: [group/a/1] → discarded"),
    ]  # fmt: skip
    for one, expected in changes:
        assert request_lines([one], None)[1].strip() == expected


def test_lines_fit_the_terminal_and_lose_nothing() -> None:
    names = [f"rollout/quickstart-261126-abcd/3/{number}" for number in range(9)]
    one = request("retry", "group/quickstart-261126-abcd/3", "failed", names, "the disk was full " * 9)
    lines = request_lines([one, one], 80)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(request_lines([one, one], None)).split())
    assert sum(line.startswith("2026-11-26 02:10:11  anna@") for line in lines) == 2
