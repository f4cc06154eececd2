"""`ratchet explain --advice`: what the hours of a run were spent on, and which setting would change it most."""

from typing import Any


def print_advice(found: dict[str, Any]) -> None:
    """Print where the rollout-hours went and the setting that would change most."""
    from cli.console import print_table

    if not found["rollout_hours"]:
        print(
            f"run {found['run_id']} has trained no step yet; `ratchet status {found['run_id']}` says what it waits for"
        )
        return
    total = sum(found["rollout_hours"].values())
    names = sorted(found["rollout_hours"], key=lambda name: -found["rollout_hours"][name])
    rows = [
        [
            name,
            f"{found['rollout_hours'][name]:.2f}",
            f"{found['rollout_hours'][name] / total:.0%}",
            f"{found['rollout_hours_by_cause'].get(name, 0.0) / total:.0%}",
        ]
        for name in names
    ]
    title = f"{found['run_id']}: {found['rollouts']} rollouts of {found['steps']} steps, {found['wall_hours']:.2f} h"
    print_table(title, ["phase", "rollout-hours", "share", "waits counted for their cause"], rows)
    print(f"{found['wasted_rollout_hours'] / total:.0%} of the rollout-hours are of groups that no step trained")
    if found["wall_hours_per_million_trained_tokens"] is not None:
        print(
            f"{found['trained_tokens']} trained tokens; per million: "
            f"{found['wall_hours_per_million_trained_tokens']:.2f} h of the run, "
            f"{found['box_hours_per_million_trained_tokens']:.1f} box-hours; "
            f"{found['sampled_tokens_per_trained_token']:.2f} sampled tokens per trained token"
        )
    print(f"most is due to {found['cause']} ({found['share']:.0%}). What changes it: {found['setting']}")
