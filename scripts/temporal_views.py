"""Print links to views of the Temporal UI, for bookmarks or for its saved views (`Save as new view` in the list).

    python scripts/temporal_views.py [--run RUN] [--ui http://127.0.0.1:8233] [--namespace default]

The UI keeps saved views in the browser, so no server can be given them; a link opens the list with the filter set.
"""

import argparse
from urllib.parse import quote

VIEWS = {
    "runs": 'WorkflowType = "TrainRun"',
    "open rollouts, oldest first": 'WorkflowType = "Rollout" AND ExecutionStatus = "Running"',
    "rollouts without a verdict": 'ratchet_outcome IN ("infra_failed", "grader_failed")',
    "solved rollouts": 'WorkflowType = "Rollout" AND ratchet_reward > 0',
    "evaluations": 'WorkflowType = "Evaluate"',
    "failed or terminated": 'ExecutionStatus IN ("Failed", "Terminated", "TimedOut")',
    "cancelled by a person": 'ExecutionStatus = "Canceled"',
    "housekeeping": 'WorkflowType IN ("Sweep", "Regrade", "AdmitTasks")',
}
"""Name of a view and its filter."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Links to views of the Temporal UI.")
    parser.add_argument("--run", help="only what belongs to this run")
    parser.add_argument("--ui", default="http://127.0.0.1:8233", help="address that `ratchet status` prints")
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    for name, query in VIEWS.items():
        if options.run and name == "housekeeping":  # belongs to no run
            continue
        query = f'ratchet_run = "{options.run}" AND {query}' if options.run else query
        address = f"{options.ui.rstrip('/')}/namespaces/{quote(options.namespace)}/workflows?query={quote(query)}"
        print(f"{name}\n  {address}")


if __name__ == "__main__":
    main()
