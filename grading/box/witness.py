"""Pytest plugin for grading boxes: report over a pipe what each test did.

An exit code can be faked by one `os._exit(0)` and a summary by one `print`; these reports cannot. The plugin is loaded
through PYTEST_PLUGINS and runs under any Python from 3.6 and pytest from 4.

Each line is `<nonce> <json>`; a pipe gives every reader another nonce. After the last test a canary, a test that must
fail in several ways, runs through the same machinery. If it is reported as passed, the runner was changed. Under xdist
the canary runs in each worker, since only the workers have tests.

For each test file it reports the file that its module was loaded from, and digests of the code that its tests run,
before the first test and after the last.

If its directory has the file `selected`, only the tests of which it has the name's digest run.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
import types

import pytest

_DIRECTORY = os.environ.get("RATCHET_WITNESS", "")
_WORKDIR = os.environ.get("RATCHET_WORKDIR", "")
_MAX_NAME = 3000
_MAX_CODES = 60
"""Digests in one line, which has to fit into what a pipe writes at once."""
_MAX_REACHED = 500
_CALLED = (
    "builtins", "datetime", "io", "json", "math", "os", "pathlib", "posixpath", "random", "time", "unittest.mock",
)  # fmt: skip
"""Modules whose functions tests call. pytest has loaded all of them before this plugin, except for the last one."""
_MAX_REPLACED = 20
_CURRENT = "PYTEST_CURRENT_TEST"
_NO_TESTS = 5
"""Exit code of pytest if no test was collected, or all were deselected."""
# Tests may replace these while they run.
_getpid, _write, _dumps = os.getpid, os.write, json.dumps
_MODULE = pytest.Module
_CAN_MAKE_TESTS = hasattr(pytest.Function, "from_parent")
"""Pytest from 5.4. Both are read before any code under test is loaded."""


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


def _read(name):
    """Return the content of a file in the witness's directory, empty if there is none."""
    try:
        with open(os.path.join(_DIRECTORY or os.devnull, name), "rb") as source:
            return source.read()
    except OSError:
        return b""


def _called():
    """Return name -> function of the modules that tests call, and of the classes in them."""
    found = {}
    for name in _CALLED:
        for key, one in list(getattr(sys.modules.get(name), "__dict__", {}).items()):
            members = list(vars(one).items()) if isinstance(one, type) else []
            for inner, member in [(key, one)] + [(key + "." + inner, member) for inner, member in members]:
                if callable(member) or type(member) in (staticmethod, classmethod):
                    found[name + "." + inner] = member
    return found


def _source_of(one):
    """Return the path of the file that a function or a class is from, empty if none is known."""
    one = one.func if type(one) is functools.partial else getattr(one, "__func__", one)
    kind = one if isinstance(one, type) else type(one)
    is_function = kind is types.FunctionType
    name = one.__code__.co_filename if is_function else getattr(sys.modules.get(kind.__module__), "__file__", "")
    return os.path.realpath(os.path.join(_STARTED_IN, name)) if name and name[0] != "<" else ""


def _replaced():
    """Return the names of functions in whose place is code of the patch, or of no file."""
    found = []
    for name, one in _called().items():
        known = _CALLED_BEFORE.get(name)
        is_late = name.startswith(_CALLED[-1])
        source = _source_of(one) if known is not one and (is_late or known is not None) else "unknown"
        if source in _PATCHED or not (source or is_late):
            found.append(name)
    return found[:_MAX_REPLACED]


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


def _held_functions(one):
    """Return the functions that an object holds: a wrapper's closure, attributes and defaults, a partial's parts."""
    if type(one) is types.MethodType:
        return [one.__func__]
    if type(one) is functools.partial:
        return [one.func, *one.args, *one.keywords.values()]
    if type(one) is not types.FunctionType:
        return []
    held = list(one.__dict__.values()) + list(one.__defaults__ or ())
    for cell in one.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            held.append(cell.cell_contents)
    for other in list(held):  # a decorator may be a class, which keeps the function in an attribute
        kind = type(other)  # an object may compute its `__class__`
        try:
            if not issubclass(kind, (type, types.ModuleType)) and kind.__module__ != "builtins":
                held.extend(object.__getattribute__(other, "__dict__").values())
        except Exception:  # it has no such attribute, or computes it
            pass
    return held


def _reached_functions(start):
    """Return `start`, if it is a function, and the functions that it was made from, the nearest first."""
    left = [start]
    known = set()
    found = []
    while left and len(found) < _MAX_REACHED:
        one = left.pop(0)
        if id(one) not in known and type(one) in (types.FunctionType, types.MethodType, functools.partial):
            known.add(id(one))
            left.extend(_held_functions(one))
            if type(one) is types.FunctionType:
                found.append(one)
    return found


def _bare_lines(path):
    """Return the first lines of the file's functions that no decorator replaces: they, and the classes that they are
    in, have none but pytest's own marks."""
    found = set()

    def visit(node, bare):
        for child in ast.iter_child_nodes(node):
            decorators = getattr(child, "decorator_list", [])
            child_bare = bare and all(_is_mark(decorator) for decorator in decorators)
            if child_bare and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(min([child.lineno] + [decorator.lineno for decorator in decorators]))
            visit(child, child_bare)

    try:
        with open(path, "rb") as source:
            visit(ast.parse(source.read()), True)
    except Exception:  # no Python, or none that this interpreter reads
        return set()
    return found


def _is_mark(decorator):
    while not isinstance(decorator, ast.Name):
        decorator = getattr(decorator, "func", None) or getattr(decorator, "value", None)
        if decorator is None:
            return False
    return decorator.id == "pytest"


class _TestCode:
    """Digests of the code of test files that items run. What is not from a test file may be the product's, which each
    patch writes in its own way, so it is left out.

    `after`: tests have run, and plugins that run coroutines have put wrappers around them meanwhile.
    """

    def __init__(self, paths, after):
        self.real_paths = {os.path.realpath(path) for path in paths}
        self.after = after
        self.origins = {}
        self.bare_lines = {}
        self.digests = {}

    def of_item(self, item):
        """Return digests of the code that the item runs. A function that the test file hands to the runner as it is
        has a further one, which a wrapper around it does not have."""
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        if id(function) not in self.digests:
            digests = set()
            for one in _reached_functions(function):
                code = one.__code__
                path = self.origin(code)
                if path:
                    digests.add(_digest_of(b"reached", code))
                    is_run = one is function or (self.after and _is_plugin_wrapper(function, one))
                    if is_run and code.co_firstlineno in self.bare_lines_of(path):
                        digests.add(_digest_of(b"run", code))
            self.digests[id(function)] = (digests, function)  # with the function, so that no other gets its id
        return self.digests[id(function)][0]

    def origin(self, code):
        """Return the path of the test file that the code says it is from, empty if it is from none."""
        name = code.co_filename
        if name not in self.origins:
            path = os.path.realpath(os.path.join(_STARTED_IN, name))
            self.origins[name] = path if path in self.real_paths else ""
        return self.origins[name]

    def bare_lines_of(self, path):
        if path not in self.bare_lines:
            self.bare_lines[path] = _bare_lines(path)
        return self.bare_lines[path]


def _is_plugin_wrapper(outer, inner):
    """Return whether a wrapper is an installed package's, or says that it wraps the function, as one of a product that
    is such a plugin does."""
    if getattr(outer, "__wrapped__", None) is inner:
        return True
    file = getattr(getattr(outer, "__code__", None), "co_filename", _WORKDIR)
    return bool(_WORKDIR) and not os.path.join(_STARTED_IN, file).startswith(_WORKDIR)


def _digest_of(how, code):
    digest = hashlib.sha256(how + b"\0")
    _add_code(digest, code)
    return digest.hexdigest()[:24]


def _name_digest(node_id):
    """Return a digest of a test's name without parameters. `oracle.py` computes the same of the reported names."""
    path, colons, name = node_id.partition("::")
    name = path + colons + name.partition("[")[0]
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _path_of(item):
    return str(getattr(item, "path", None) or getattr(item, "fspath", ""))  # without legacypath there is no fspath


def _modules(items, after=False):
    """Return path of a test file -> the file that its module says it is from, and digests of its tests' code.

    Each begins with that of the test's name. How many parameters a test has does not matter, but each has to run the
    code, so what only some of them run is left out.
    """
    code = _TestCode({_path_of(item) for item in items}, after)
    files = {}
    tests = {}
    for item in items:
        path = _path_of(item)
        files.setdefault(path, str(getattr(getattr(item, "module", None), "__file__", "")))
        key = (path, _name_digest(item.nodeid[:_MAX_NAME]))
        own = code.of_item(item)
        tests[key] = tests[key] & own if key in tests else own
    found = {path: (files[path], set()) for path in files}
    for path, name in tests:
        found[path][1].update(name + digest for digest in tests[path, name])
    return found


class Witness:
    def __init__(self, nonce, pipe, number, worker, selected):
        self.nonce = nonce
        self.pipe = pipe
        self.number = number
        self.worker = worker
        self.selected = selected
        self.pid = os.getpid()
        self.items = []
        self.numbers = {}
        self.modules = {}
        self.ran = set()
        self.canary = ""
        self.canary_parent = None

    def send(self, kind, **facts):
        if _getpid() != self.pid:
            return  # a child that the tests forked is not the runner
        line = _dumps(dict(facts, kind=kind, session=self.number))
        _write(self.pipe, (self.nonce + " " + line + "\n").encode("ascii"))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leave out what is not selected, after all plugins have seen and ordered the collected tests."""
        yield
        if self.selected is not None:
            left_out = [item for item in items if not self.is_selected(item)]
            items[:] = [item for item in items if self.is_selected(item)]
            config.hook.pytest_deselected(items=left_out)
        self.items = list(items)

    def is_selected(self, item):
        return _name_digest(item.nodeid[:_MAX_NAME]) in self.selected

    def pytest_collection_finish(self, session):
        self.items = list(session.items)
        self.tell_replaced()
        self.modules = _modules(self.items)
        parents = [item.getparent(_MODULE) for item in self.items if hasattr(item, "getparent")]
        parents = [parent for parent in parents if parent is not None]
        self.canary_parent = parents[-1] if parents and _CAN_MAKE_TESTS else None
        self.numbers = {item.nodeid.replace("\0", "(null)"): number for number, item in enumerate(self.items)}

    def hide_parameters(self):
        """Replace the parameters in PYTEST_CURRENT_TEST by a number, because their names may tell expected values.

        The name stays one of this test alone, for those who make other names from it.
        """
        node_id, blank, when = os.environ.get(_CURRENT, "").rpartition(" (")
        number = self.numbers.get(node_id)
        if number is not None and "[" in node_id:
            os.environ[_CURRENT] = node_id.partition("[")[0] + "[" + str(number) + "]" + blank + when

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_fixture_setup(self):
        self.hide_parameters()  # pytest sets the variable after the hooks that run before a test
        yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self):
        self.hide_parameters()
        yield

    def pytest_collectreport(self, report):
        if report.outcome == "failed":
            self.send("test", name=report.nodeid[:_MAX_NAME], when="collect", outcome="failed")

    def pytest_runtest_logreport(self, report):
        if self.worker or (self.canary and self.canary in report.nodeid):
            return
        if report.outcome == "rerun" or report.when not in ("setup", "call", "teardown"):
            return  # a try of pytest-rerunfailures, which runs again, or a worker of xdist that died: no test's result
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
        self.tell_replaced()
        told = self.tell_canary() if self.items else "none"
        self.tell_modules()
        if self.selected is not None and int(exitstatus) == _NO_TESTS:
            session.exitstatus = 0  # a command goes on to its next session
        self.send(
            "end", exit=int(exitstatus), canary=told, seconds=round(time.time() - _STARTED, 3),
            missed=0 if self.worker else len({item.nodeid for item in self.items} - self.ran),
        )  # fmt: skip

    def tell_replaced(self):
        """Report functions that tests call and the patch has replaced; fixtures have put back what they replaced."""
        with contextlib.suppress(Exception):  # a product's object computes what it is
            for name in _replaced():
                self.send("flag", what="replaces what the tests call", place=name)

    def tell_modules(self):
        now = _modules(self.items, after=True)
        for path in now:
            file, codes = self.modules.get(path, ("", set()))
            changed = file != now[path][0] or not codes <= now[path][1]
            told = ["changed"] if changed else sorted(codes)
            for start in range(0, len(told) or 1, _MAX_CODES):
                part = told[start : start + _MAX_CODES]
                self.send("module", path=path[:_MAX_NAME], file=file[:_MAX_NAME], codes=part)

    def tell_canary(self):
        """Run the canary: `failed` is correct, `passed` means a changed runner, `unsupported` that it did not run: this
        pytest or these tests, none of which is in a Python module, have no place for it, or a conftest.py skips it."""
        from _pytest import runner

        if self.canary_parent is None:
            return "unsupported"
        name = "test_" + os.urandom(6).hex()
        self.canary = name
        item = pytest.Function.from_parent(self.canary_parent, name=name, callobj=_canary)
        item._fixtureinfo.names_closure[:] = []
        if hasattr(item, "fixturenames"):
            item.fixturenames = []
        reports = runner.runtestprotocol(item, log=False, nextitem=None)
        if any(report.failed for report in reports):
            return "failed"
        return "passed" if any(report.passed and report.when == "call" for report in reports) else "unsupported"


def _canary():
    """Fail in every way that a test can fail; pass only if one of them has been disabled."""
    import unittest

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
_STARTED_IN = os.getcwd()
_NONCE, _PIPE = (_read_nonce(), _open_pipe()) if _DIRECTORY else ("", -1)
_SELECTED = frozenset(_read("selected").decode().split()) or None
"""Digests of the names of the tests to run, None if all run."""
_PATCHED = {os.path.realpath(os.path.join(_WORKDIR, os.fsdecode(path))) for path in _read("patched").split(b"\0")[:-1]}
_CALLED_BEFORE = _called()
_NUMBER = 0


def pytest_configure(config):
    global _NUMBER
    if not _NONCE or _PIPE < 0:
        return
    _NUMBER += 1
    worker = hasattr(config, "workerinput")
    selected = None if os.environ.get(_CURRENT) else _SELECTED  # a test's own sessions run all their tests
    witness = Witness(_NONCE, _PIPE, _NUMBER, worker, selected)
    witness.send("begin", root=str(getattr(config, "rootpath", None) or getattr(config, "rootdir", "")), worker=worker)
    config.pluginmanager.register(witness, "ratchet-witness-" + str(_NUMBER))
