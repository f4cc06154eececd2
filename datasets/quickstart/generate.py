"""Write `train.jsonl` and `heldout.jsonl` beside this file: one-line bugs in real git repositories, with hidden tests.

The rows are committed, and so is this generator; running `python datasets/quickstart/generate.py` again gives the same
bytes.
"""

from pathlib import Path

from examples.tiny_policy.bug_tasks import held_out_tasks, train_tasks
from examples.tiny_policy.dataset_rows import dataset_text, run_generator

README = """\
# {stem}

One function: `{function}` in `{file}`.
"""


def write_dataset(folder: Path) -> None:
    for name, part, tasks in (("train", "train", train_tasks()), ("heldout", "heldout", held_out_tasks())):
        (folder / f"{name}.jsonl").write_text(dataset_text(tasks, part, README), encoding="utf-8")


if __name__ == "__main__":
    run_generator(write_dataset, __file__)
