"""Audit hook of the Python processes in a grading box: report actions that takeovers of a test run need.

Python imports this file at its start, because its directory is on PYTHONPATH; the directory belongs to root. It reports
an action only if code of the repository outside its tests is the caller. It changes nothing. Runs under any Python from
3.8; older ones have no audit hooks.
"""

import json
import os
import sys

_DIRECTORY = os.environ.get("RATCHET_WITNESS", "")
_WORKDIR = os.environ.get("RATCHET_WORKDIR", "")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MAX_FLAGS = 20
_MAX_DEPTH = 12
_EVENTS = {
    "gc.get_objects": "looks up live objects",
    "gc.get_referrers": "looks up live objects",
    "gc.get_referents": "looks up live objects",
    "sys._getframe": "walks stack frames",
    "sys._current_frames": "walks stack frames",
    "sys.settrace": "traces",
    "sys.setprofile": "traces",
    "sys.addaudithook": "traces",
    "code.__new__": "makes code objects",
    "object.__setattr__": "changes code objects",
    "ctypes.dlopen": "uses ctypes",
    "open": "reads a test file",
}


def _is_test(path):
    name = os.path.basename(path)
    return name.startswith("test_") or name.endswith(("_test.py", "conftest.py")) or "/tests/" in path


def _install():
    reported = set()
    nonce = []
    busy = []
    get_frame = sys._getframe

    def report(what, place):
        if (what, place) in reported or len(reported) >= _MAX_FLAGS:
            return
        reported.add((what, place))
        if not nonce:
            source = os.open(os.path.join(_DIRECTORY, "nonce"), os.O_RDONLY | os.O_NONBLOCK)
            nonce.append(os.read(source, 33).decode().strip())
            os.close(source)
        line = nonce[0] + " " + json.dumps({"kind": "flag", "session": 0, "what": what, "place": place}) + "\n"
        pipe = os.open(os.path.join(_DIRECTORY, "frames"), os.O_WRONLY)
        os.write(pipe, line.encode("ascii"))
        os.close(pipe)

    def place_of(frame, through_library):
        """Return file:line of the repository's code that acts, empty if other code does."""
        for _ in range(_MAX_DEPTH):
            if frame is None:
                return ""
            file = frame.f_code.co_filename
            if file.startswith(_WORKDIR):
                return "" if _is_test(file) else f"{file[len(_WORKDIR) :].lstrip('/')}:{frame.f_lineno}"
            if not through_library or not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file:
                return ""
            frame = frame.f_back
        return ""

    def hook(event, arguments):
        what = _EVENTS.get(event)
        if what is None or busy:
            return
        if event == "object.__setattr__" and arguments[1] != "__code__":
            return
        if event == "open":
            path = arguments[0]
            if not isinstance(path, str) or not path.endswith(".py") or not _is_test(path):
                return
        busy.append(1)
        try:
            place = place_of(get_frame(1), event != "sys._getframe")
            if place:
                report(what, place)
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
