"""Pytest plugin for grading boxes: report over a pipe what each test did.

An exit code can be faked by one `os._exit(0)` and a summary by one `print`; these reports cannot. The plugin is loaded
through PYTEST_PLUGINS and runs under any Python from 3.6 and pytest from 4.

Each line is `<nonce> <json>`; a pipe gives every reader another nonce. After the last test a canary, a test that must
fail in several ways, runs through the same machinery. If it is reported as passed, the runner was changed. Under xdist
the canary runs in each worker, since only the workers have tests.

For each test file it reports the file that its module was loaded from, and a digest of its tests' code before the
first test and after the last.
"""

import hashlib
import json
import os
import time

_DIRECTORY = os.environ.get("RATCHET_WITNESS", "")
_MAX_NAME = 3000


def _read_nonce():
    try:
        source = os.open(os.path.join(_DIRECTORY, "nonce"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(source, 33).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(source)


def _open_pipe():
    try:
        return os.open(os.path.join(_DIRECTORY, "frames"), os.O_WRONLY)
    except OSError:
        return -1


def _add_code(digest, code):
    digest.update(code.co_name.encode("utf-8", "replace") + b"\0")
    digest.update(code.co_code + repr(code.co_names).encode("utf-8", "replace"))
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            _add_code(digest, constant)
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode("utf-8", "replace"))
        else:
            digest.update(repr(constant).encode("utf-8", "replace"))


def _modules(items):
    """Return path of a test file -> the file that its module says it is from, and a digest of its tests' code."""
    found = {}
    for item in items:
        path = str(getattr(item, "path", None) or getattr(item, "fspath", ""))  # without legacypath there is no fspath
        module = getattr(item, "module", None)
        if path not in found:
            found[path] = (str(getattr(module, "__file__", "")), hashlib.sha256())
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", function)
        if hasattr(function, "__code__"):
            _add_code(found[path][1], function.__code__)
    return {path: (file, digest.hexdigest()[:32]) for path, (file, digest) in found.items()}


class _Witness:
    def __init__(self, nonce, pipe, number, worker):
        self.nonce = nonce
        self.pipe = pipe
        self.number = number
        self.worker = worker
        self.pid = os.getpid()
        self.items = []
        self.modules = {}
        self.ran = set()
        self.canary = ""

    def send(self, kind, **facts):
        if os.getpid() != self.pid:
            return  # a child that the tests forked is not the runner
        line = json.dumps(dict(facts, kind=kind, session=self.number))
        os.write(self.pipe, (self.nonce + " " + line + "\n").encode("ascii"))

    def pytest_collection_modifyitems(self, items):
        self.items = list(items)

    def pytest_collection_finish(self, session):
        self.items = list(session.items)
        self.modules = _modules(self.items)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":
            self.send("test", name=report.nodeid[:_MAX_NAME], when="collect", outcome="failed")

    def pytest_runtest_logreport(self, report):
        if self.worker or (self.canary and self.canary in report.nodeid):
            return
        self.ran.add(report.nodeid)
        if report.when != "call" and report.outcome == "passed":
            return
        place = ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            place = str(report.longrepr[0])
        elif hasattr(report, "wasxfail"):
            place = str(getattr(getattr(report.longrepr, "reprcrash", None), "path", ""))
        self.send(
            "test", name=report.nodeid[:_MAX_NAME], when=report.when, outcome=str(report.outcome),
            xfail=hasattr(report, "wasxfail"), place=place[:_MAX_NAME],
        )  # fmt: skip

    def pytest_sessionfinish(self, session, exitstatus):
        told = self.tell_canary() if self.items else "none"
        modules = _modules(self.items)
        for path in modules:
            file, digest = modules[path]
            same = self.modules.get(path) == modules[path]
            self.send("module", path=path[:_MAX_NAME], file=file[:_MAX_NAME], digest=digest if same else "changed")
        self.send(
            "end", exit=int(exitstatus), canary=told, seconds=round(time.time() - _STARTED, 3),
            missed=0 if self.worker else len({item.nodeid for item in self.items} - self.ran),
        )  # fmt: skip

    def tell_canary(self):
        """Run the canary: `failed` is correct, `passed` means a changed runner, `none` that it could not be run."""
        import pytest
        from _pytest import runner

        parents = [item.getparent(pytest.Module) for item in self.items if hasattr(item, "getparent")]
        parents = [parent for parent in parents if parent is not None]
        if not parents or not hasattr(pytest.Function, "from_parent"):
            return "none"
        name = "test_" + os.urandom(6).hex()
        self.canary = name
        item = pytest.Function.from_parent(parents[-1], name=name, callobj=_canary)
        item._fixtureinfo.names_closure[:] = []
        if hasattr(item, "fixturenames"):
            item.fixturenames = []
        reports = runner.runtestprotocol(item, log=False, nextitem=None)
        return "failed" if any(report.failed for report in reports) else "passed"


def _canary():
    """Fail in every way that a test can fail; pass only if one of them has been disabled."""
    import unittest

    import pytest

    try:
        assert 0 == 1
    except AssertionError:
        pass
    else:
        return
    try:
        with pytest.raises(KeyError):
            pass
    except BaseException:
        pass
    else:
        return
    try:
        unittest.TestCase("__init__").assertEqual(0, 1)
    except AssertionError:
        pass
    else:
        return
    if pytest.approx(2) == 1:
        return
    if not _failing_case(unittest):
        return
    raise AssertionError("this must be reported as a failure")


def _failing_case(unittest):
    class Case(unittest.TestCase):
        def runTest(self):
            self.assertTrue(False)

    result = unittest.TestResult()
    Case().run(result)
    return result.failures


_STARTED = time.time()
_NONCE, _PIPE = (_read_nonce(), _open_pipe()) if _DIRECTORY else ("", -1)
_NUMBER = 0


def pytest_configure(config):
    global _NUMBER
    if not _NONCE or _PIPE < 0:
        return
    _NUMBER += 1
    worker = hasattr(config, "workerinput")
    witness = _Witness(_NONCE, _PIPE, _NUMBER, worker)
    witness.send("begin", root=str(getattr(config, "rootpath", None) or getattr(config, "rootdir", "")), worker=worker)
    config.pluginmanager.register(witness, "ratchet-witness-" + str(_NUMBER))
