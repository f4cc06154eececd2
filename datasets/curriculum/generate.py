"""Write the curriculum's datasets beside this file: repositories of two source files and a check, with hidden tests.

The rows are committed, and so is this generator; running `python datasets/curriculum/generate.py` again gives the same
bytes.
"""

from pathlib import Path

from examples.curriculum.tasks import held_out_repositories, train_repositories
from examples.tiny_policy.dataset_rows import dataset_text, run_generator
from examples.tiny_policy.simulated_shell import CHECK_FILE

README = """\
# {stem}

`./check` tries `{function}` in `{file}` on a few examples.
"""


def write_dataset(folder: Path) -> None:
    """Write one file per part and kind of family, since evaluations are reported by file."""
    for part, tasks in (("train", train_repositories()), ("heldout", held_out_repositories())):
        for kind in dict.fromkeys(task.kind for task in tasks):
            of_kind = [task for task in tasks if task.kind == kind]
            text = dataset_text(of_kind, f"{part}-{kind}", README, (CHECK_FILE,))
            (folder / f"{part}_{kind}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_generator(write_dataset, __file__)
