"""Reports of the audit hook: each is played by a Python process that runs a test of a product."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BOX = Path(__file__).parents[4] / "grading" / "box"
_TEST = (
    "import sys\nimport types\nsys.modules['_pytest'] = types.ModuleType('_pytest')\nimport product\n\n\nproduct.{}\n"
)


def _flags(directory: Path, product: str, test: str = "run()", patched: str = "") -> set[tuple[str, str]]:
    """Run a test that calls the product and return what was reported: what, and in which file. `patched`: the files
    that a patch writes, if its box knows them."""
    witness = directory / "witness"
    witness.mkdir()
    (witness / "nonce").write_text("n" * 32 + "\n")
    if patched:
        (witness / "patched").write_text(f"{patched}\0")
    os.mkfifo(witness / "frames")
    shutil.copy(_BOX / "sitecustomize.py", witness)
    workdir = directory / "work"
    (workdir / "tests").mkdir(parents=True)
    (workdir / "product.py").write_text(product)
    (workdir / "tests" / "test_it.py").write_text(_TEST.format(test))
    (workdir / "link").symlink_to("tests/test_it.py")
    environment = {
        **os.environ,
        "RATCHET_WITNESS": str(witness),
        "RATCHET_WORKDIR": str(workdir),
        "PYTHONPATH": f"{witness}:{workdir}",
    }
    pipe = os.open(witness / "frames", os.O_RDWR | os.O_NONBLOCK)
    try:
        command = [sys.executable, "-B", "tests/test_it.py"]
        subprocess.run(command, cwd=workdir, env=environment, check=True, capture_output=True, timeout=60)
        try:
            told = os.read(pipe, 60_000).decode()
        except BlockingIOError:
            told = ""
    finally:
        os.close(pipe)
    frames = [json.loads(line.partition(" ")[2]) for line in told.splitlines()]
    return {(frame["what"], frame["place"].partition(":")[0]) for frame in frames}


@pytest.mark.parametrize(
    "action",
    [
        "open('tests/test_it.py').read()",
        "open(b'tests/test_it.py').read()",
        "open('link').read()",
        "pathlib.Path('tests', 'test_it.py').read_text()",
        "os.open(b'test_it.py', os.O_RDONLY, dir_fd=os.open('tests', os.O_RDONLY))",
    ],
)
def test_a_product_that_reads_a_test_is_named(tmp_path: Path, action: str) -> None:
    product = f"import os\nimport pathlib\n\n\ndef run():\n    {action}\n"
    assert _flags(tmp_path, product) == {("reads a test file", "product.py")}


def test_frames_that_an_object_holds_are_named(tmp_path: Path) -> None:
    product = (
        "def run():\n    try:\n        raise ValueError\n    except ValueError as error:\n"
        "        getattr(error.__traceback__, 'tb' + '_frame')\n"
    )
    assert _flags(tmp_path, product) == {("walks stack frames", "product.py")}


def test_code_made_at_run_time_does_not_hide_what_it_does(tmp_path: Path) -> None:
    product = "exec('import sys\\ndef run():\\n    sys._getframe(1)')\n"
    made = ("runs code made at run time", "product.py")
    assert _flags(tmp_path, product) == {("walks stack frames", "<string>"), made}


@pytest.mark.parametrize(("patched", "is_named"), [("product.py", True), ("other.py", False)])
def test_code_made_at_run_time_is_named_if_a_patch_makes_it(tmp_path: Path, patched: str, is_named: bool) -> None:
    """A repository's own code may make some in each call, as classes of attrs do."""
    product = "run = eval(compile('lambda: 1', '<made>', 'eval'))\n"
    named = {("runs code made at run time", "product.py")} if is_named else set()
    assert _flags(tmp_path, product, patched=patched) == named


@pytest.mark.parametrize(
    ("action", "what"),
    [
        ("sys._getframe(1).f_globals.get('wanted')", "walks stack frames"),
        ("sys._getframe(1).f_code.co_consts", "walks stack frames"),
        ("ctypes.pythonapi.Py_IsInitialized()", "uses ctypes"),
        ("(ctypes.c_char * 1).from_address(id(sys))", "uses ctypes"),
        ("traceback.extract_stack()", "reads a test file"),
        ("getattr(sys, '_get' + 'frame')(1)", "walks stack frames"),
        ("sys._getframe(1).f_back", "walks stack frames"),
        ("getattr(sys, 'set' + 'trace')(None)", "traces"),
        ("threading.__dict__['set' + 'trace'](None); sys.__dict__['set' + 'profile'](None)", "traces"),
        ("vars(__import__('g' + 'c'))['get_ref' + 'errers'](run)", "looks up live objects"),
        ("vars(builtins)['ex' + 'ec']('pass')", "runs code made at run time"),
        ("builtins.compile('1', 'x', 'eval')", "runs code made at run time"),
        ("list(map(vars(builtins)['ev' + 'al'], ['1']))", "runs code made at run time"),
    ],
)
def test_what_only_a_takeover_asks_for_is_named(tmp_path: Path, action: str, what: str) -> None:
    imports = "import builtins\nimport ctypes\nimport sys\nimport threading\nimport traceback\n"
    product = f"{imports}\n\ndef run():\n    {action}\n"
    assert _flags(tmp_path, product) == {(what, "product.py")}


@pytest.mark.parametrize(
    "action",
    [
        "sys._getframe(1).f_code.co_name",
        "sys._getframe(1).f_lineno",
        "sys._getframe(1).f_globals['__name__']",
        "warnings.warn('old', UserWarning, stacklevel=2)",
        "ctypes.CDLL(None).getpid()",
        "open(made).read()",
    ],
)
def test_ordinary_uses_of_these_are_not_named(tmp_path: Path, action: str) -> None:
    (tmp_path / "test_made.py").write_text("def test_it(): pass\n")
    made = f"import ctypes\nimport sys\nimport warnings\n\nmade = {str(tmp_path / 'test_made.py')!r}\n\n\n"
    assert _flags(tmp_path, f"{made}def run():\n    {action}\n") == set()


def test_ordinary_work_is_not_named(tmp_path: Path) -> None:
    product = (
        "import collections\nimport dataclasses\nimport logging\n\n\n@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "\n\ndef run():\n    Point(1), collections.namedtuple('Pair', 'x y')(1, 2)\n"
        "    logging.getLogger('a').warning('text')\n    open('product.py').read()\n    return run.__code__\n"
    )
    assert _flags(tmp_path, product) == set()
    (tmp_path / "other").mkdir()
    read_by_test = "run(open(__file__))"
    assert _flags(tmp_path / "other", "def run(source):\n    source.read()\n", read_by_test) == set()
