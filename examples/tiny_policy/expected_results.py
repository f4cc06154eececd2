"""Results of a task's function for the test's arguments, and the assertions that require them.

The code is run in this process: this package wrote it.
"""

from collections.abc import Sequence

from examples.tiny_policy.bug_tasks import Arguments


def call_results(source: str, function: str, cases: Sequence[Arguments]) -> list[object]:
    """Return what `function` of `source` returns for each case; an exception counts as a result."""
    namespace: dict[str, object] = {}
    exec(compile(source, f"{function}.py", "exec"), namespace)
    called = namespace[function]
    assert callable(called)
    results: list[object] = []
    for case in cases:
        try:
            results.append(called(*case))
        except Exception as error:  # a bug may raise; only the difference matters
            results.append(error)
    return results


def assertions(source: str, function: str, cases: Sequence[Arguments]) -> str:
    """Return one indented line per case, which holds for `source`."""
    return "\n".join(
        f"    assert {function}({', '.join(map(repr, case))}) == {result!r}"
        for case, result in zip(cases, call_results(source, function, cases), strict=True)
    )
