"""Write the curriculum's datasets beside this file: repositories of two source files and a check, with hidden tests.

The rows are committed, and so is this generator; running `python datasets/curriculum/generate.py` again gives the same
bytes.
"""

import argparse
from pathlib import Path

from examples.curriculum.tasks import RepositoryTask, held_out_repositories, joined_source, train_repositories
from examples.tiny_policy.dataset_rows import GeneratedTask, dataset_text
from examples.tiny_policy.simulated_shell import CHECK_FILE

README = """\
# {stem}

`./check` tries `{function}` in `{file}` on a few examples.
"""


def generated(task: RepositoryTask) -> GeneratedTask:
    return GeneratedTask(
        entry=task.entry,
        function=task.function,
        issue=task.issue,
        family=task.family,
        digest=task.digest,
        files=task.files,
        fixed_files=task.fixed_files,
        source=joined_source(task.files, task.entry),
        fixed_source=joined_source(task.fixed_files, task.entry),
        cases=task.cases,
        readme=README.format(stem=Path(task.entry).stem, function=task.function, file=task.entry),
        executables=(CHECK_FILE,),
    )


def write_dataset(folder: Path) -> None:
    """Write one file per part and kind of family, since evaluations are reported by file."""
    for part, tasks in (("train", train_repositories()), ("heldout", held_out_repositories())):
        for kind in dict.fromkeys(task.kind for task in tasks):
            rows = [generated(task) for task in tasks if task.kind == kind]
            (folder / f"{part}_{kind}.jsonl").write_text(dataset_text(rows, f"{part}-{kind}"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the curriculum's datasets.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder for the files")
    write_dataset(parser.parse_args().out)


if __name__ == "__main__":
    main()
