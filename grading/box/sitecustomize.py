"""Audit hook of the Python processes in a grading box: report actions that takeovers of a test run need.

Python imports this file at its start, because its directory is on PYTHONPATH; the directory belongs to root. It reports
an action only if code of the repository outside its tests is the caller, and one of the tests: reading a file of the
base that the patch changes, which may hold expected values. It changes nothing. Runs under any Python from 3.8; older
ones have no audit hooks.
"""

import json
import os
import sys

_DIRECTORY = os.environ.get("RATCHET_WITNESS", "")
_WORKDIR = os.environ.get("RATCHET_WORKDIR", "")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MAX_FLAGS = 20
_MAX_DEPTH = 12
_MAX_READ_DEPTH = 60
_MAX_CHANGED_BYTES = 1000000
_SOURCES = (b".py", b".pyi", b".pyc")
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_ATTRIBUTES = {"object.__setattr__": ("__code__",), "object.__getattr__": _FRAMES}
"""Event -> the attributes of which it is reported."""
_FRAME_EVENTS = ("sys._getframe", "object.__getattr__")
_DIRECT = (*_FRAME_EVENTS, "compile", "exec")
"""Events of which the library's own are ordinary."""
_OF_PATCHES = ("compile", "exec")
"""Events that are ordinary in the code of a repository; those in files that the patch writes are reported."""
_PLACES = ("co_filename", "co_firstlineno", "co_name", "co_qualname", "f_globals", "f_lineno")
_STEPS = ("f_back", "f_code")
_EVENTS = {
    "gc.get_objects": "looks up live objects",
    "gc.get_referrers": "looks up live objects",
    "gc.get_referents": "looks up live objects",
    "sys._getframe": "walks stack frames",
    "sys._current_frames": "walks stack frames",
    "sys.settrace": "traces",
    "sys.setprofile": "traces",
    "sys.addaudithook": "traces",
    "sys.monitoring.register_callback": "traces",
    "compile": "runs code made at run time",
    "exec": "runs code made at run time",
    "code.__new__": "makes code objects",
    "object.__setattr__": "changes code objects",
    "object.__getattr__": "walks stack frames",
    "ctypes.dlsym": "uses ctypes",
    "ctypes.cdata": "uses ctypes",
    "open": "reads a test file",
}


def _is_test(path):
    name = os.path.basename(path)
    return name.startswith("test_") or name.endswith(("_test.py", "conftest.py")) or "/tests/" in path


def _has_test(path):
    """Return whether a path, or what its links lead to, is a test's source in the repository or the bytecode of one."""
    real = os.path.realpath(path)
    is_own = real.startswith(os.path.realpath(_WORKDIR) + os.sep) or not os.path.isabs(path)
    return is_own and any(one.endswith((".py", ".pyc")) and _is_test(one) for one in {path, real})


def _listed(name):
    """Return real path -> path of the files in a list that the box's host has written; empty without it."""
    try:
        with open(os.path.join(_DIRECTORY, name), "rb") as source:
            paths = source.read(_MAX_CHANGED_BYTES).split(b"\0")[:-1]
    except OSError:
        return {}
    root = os.path.realpath(_WORKDIR)
    return {os.path.join(root, os.fsdecode(path)): path for path in paths}


def _changed_files():
    """Return path -> printable name of the base's files that the patch changes, without sources that imports read."""
    changed = _listed("changed").items()
    return {file: path.decode("utf-8", "backslashreplace") for file, path in changed if not path.endswith(_SOURCES)}


def _is_read_by_test(frame):
    """Return whether the repository's code that reads is a test; installed packages may read for it."""
    for _ in range(_MAX_READ_DEPTH):
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if file.startswith(_WORKDIR + os.sep) and "site-packages" not in file:
            return _is_test(file)
        frame = frame.f_back
    return False


class _Reporter:
    """Sends each flag once."""

    def __init__(self):
        self.reported = set()
        self.nonce = ""

    def report(self, what, place):
        if (what, place) in self.reported or len(self.reported) >= _MAX_FLAGS:
            return
        self.reported.add((what, place))
        if not self.nonce:
            source = os.open(os.path.join(_DIRECTORY, "nonce"), os.O_RDONLY | os.O_NONBLOCK)
            self.nonce = os.read(source, 33).decode().strip()
            os.close(source)
        line = self.nonce + " " + json.dumps({"kind": "flag", "session": 0, "what": what, "place": place}) + "\n"
        pipe = os.open(os.path.join(_DIRECTORY, "frames"), os.O_WRONLY)
        os.write(pipe, line.encode("ascii"))
        os.close(pipe)


def _asks_for_places(code):
    """Return whether code asks frames for files, lines and names only, as a logger does."""
    names = [name for name in code.co_names if name.startswith(("f_", "co_"))]
    is_known = "f_globals" not in names or "__name__" in code.co_consts
    is_place = any(name in _PLACES for name in names) and set(names) <= {*_PLACES, *_STEPS}
    return is_place and is_known and "getattr" not in code.co_names


def _is_in_test_run():
    """Return whether this process runs tests: what others run as `-c` is a test's or a script's own."""
    return "_pytest" in sys.modules


def _place_of(frame, through_library):
    """Return file:line of the repository's code that acts, empty if other code does."""
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        if file.startswith(_WORKDIR):
            return "" if _is_test(file) else f"{file[len(_WORKDIR) :].lstrip('/')}:{frame.f_lineno}"
        if file == "<string>" and _is_in_test_run():  # code that the product's `exec` has made hides its place
            return f"{file}:{frame.f_lineno}"
        if not through_library or not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file:
            return ""
        if frame.f_code.co_name == "_showwarnmsg":  # a warning is shown with its source line
            return ""
        frame = frame.f_back
    return ""


def _install():
    reporter = _Reporter()
    changed = _changed_files()
    patched = _listed("patched")
    changed_names = {os.path.basename(path) for path in changed}
    busy = []
    get_frame = sys._getframe

    def report_read(path, flags):
        path = os.fsdecode(path)
        if os.path.basename(path) in changed_names and flags & os.O_ACCMODE != os.O_WRONLY:
            place = changed.get(os.path.realpath(path))
            if place and _is_read_by_test(get_frame(2)):
                reporter.report("changes a file that the tests read", place)

    def hook(event, arguments):
        what = _EVENTS.get(event)
        if what is None or busy:
            return
        if event in _ATTRIBUTES and arguments[1] not in _ATTRIBUTES[event]:
            return
        busy.append(1)
        try:
            if event == "open":
                path, _, flags = arguments
                if changed and not isinstance(path, int):
                    report_read(path, flags)
                if isinstance(path, int):
                    return
            if event == "ctypes.dlsym" and "Py" not in str(arguments[1]):
                return
            through_library = event not in _DIRECT
            if event in _FRAME_EVENTS and _asks_for_places(get_frame(1).f_code):
                return
            if event in _OF_PATCHES and patched:
                file = get_frame(1).f_code.co_filename
                if file != "<string>" and os.path.realpath(file) not in patched:
                    return
            place = _place_of(get_frame(1), through_library)
            if place and event == "open" and not _has_test(os.fsdecode(arguments[0])):
                return
            if place:
                reporter.report(what, place)
        except Exception:  # a hook that raises would change the tests
            pass
        finally:
            busy.pop()

    sys.addaudithook(hook)


def _import_next():
    """Run the sitecustomize of the image, which this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _DIRECTORY])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if _DIRECTORY and _WORKDIR and hasattr(sys, "addaudithook"):
    _install()
_import_next()
