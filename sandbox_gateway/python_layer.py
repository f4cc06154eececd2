"""The layer `python`: an interpreter with pytest for boxes, built once per machine and mounted at /opt/ratchet. Graders
must not depend on an image's own Python, and a box cannot download anything."""

import compileall
import hashlib
import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from ratchet.errors import MachineError

PYTHON_LAYER_PATH = "/opt/ratchet"
"""Path of the layer inside boxes; its scripts contain this path."""
_PINS = ("iniconfig==2.3.1", "packaging==26.3", "pluggy==1.7.0", "pygments==2.21.0", "pytest==9.2.0")
_RECIPE = 1
"""Increase it when the steps below give another result from the same interpreter and pins."""
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = (
    "__pycache__", "config-*", "dist-packages", "ensurepip", "idlelib", "site-packages", "sitecustomize.py", "test",
    "tests", "tkinter", "turtledemo", "EXTERNALLY-MANAGED",
)  # fmt: skip
_ABANDONED_SECONDS = 3600
_UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
_RELATIVE_LIBRARY_PATH = b"$ORIGIN/../lib\0"

# Debian's interpreter searches only dist-packages.
_SITECUSTOMIZE = """\
import os, sys
_packages = os.path.join(sys.prefix, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
if _packages not in sys.path:
    sys.path.append(_packages)
"""
_PYTEST_SCRIPT = f"#!{PYTHON_LAYER_PATH}/bin/python3\nimport sys\nimport pytest\nsys.exit(pytest.console_main())\n"


def ensure_python_layer(cache_directory: Path) -> Path:
    """Return the layer's directory; build it if this interpreter and these pins have none.

    An interrupted build leaves nothing that passes for a layer; concurrent builds produce one result. Raises
    MachineError if it cannot be built.
    """
    interpreter = (Path(sys.base_prefix) / "bin" / f"python{_VERSION}").resolve()
    if not interpreter.exists():
        raise MachineError(f"The interpreter {interpreter} is missing; make the environment anew with a whole Python.")
    target = cache_directory / "layers" / f"python-{_digest(interpreter)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(target.parent)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    umask = os.umask(0o022)  # every user of a box reads it
    try:
        _build(interpreter, building)
        building.chmod(0o755)
        try:
            building.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        os.umask(umask)
        shutil.rmtree(building, ignore_errors=True)
    return target


def _clear_abandoned(directory: Path) -> None:
    """Remove leftovers of killed builds; recent ones may be builds in progress."""
    for leftover in directory.glob(".python-*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _digest(interpreter: Path) -> str:
    stamp = interpreter.stat()
    facts = (sys.version, str(interpreter), stamp.st_size, stamp.st_mtime_ns, _PINS, _RECIPE)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _build(interpreter: Path, layer: Path) -> None:
    library = layer / "lib" / f"python{_VERSION}"
    packages = library / "site-packages"
    standard_library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(standard_library, library, ignore=shutil.ignore_patterns(*_LEFT_OUT), ignore_dangling_symlinks=True)
    (library / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    _copy_interpreter(interpreter, layer)
    _install(interpreter, packages, ["--no-deps", *_PINS])
    script = layer / "bin" / "pytest"
    script.write_text(_PYTEST_SCRIPT)
    script.chmod(0o755)
    _compile(layer)
    _check(layer)


def _copy_interpreter(interpreter: Path, layer: Path) -> None:
    """Copy the program and, if it is linked against one, its own libpython; the link is made relative."""
    target = layer / "bin" / "python3"
    target.parent.mkdir()
    program = interpreter.read_bytes()
    absolute = f"{sys.base_prefix}/lib".encode() + b"\0"
    if absolute in program and len(absolute) >= len(_RELATIVE_LIBRARY_PATH):
        program = program.replace(absolute, _RELATIVE_LIBRARY_PATH.ljust(len(absolute), b"\0"))
    target.write_bytes(program)
    target.chmod(0o755)
    (layer / "bin" / "python").symlink_to("python3")
    if b"libpython" in program:
        for shared in (Path(sys.base_prefix) / "lib").glob(f"libpython{_VERSION}*.so.*"):
            shutil.copy2(shared, layer / "lib" / shared.name)


def install_packages(packages: Path, requirements: list[str]) -> None:
    """Install and compile packages for the layer; requirements and options are pip's. Raises MachineError."""
    _install((Path(sys.base_prefix) / "bin" / f"python{_VERSION}").resolve(), packages, requirements)
    compileall.compile_dir(str(packages), quiet=2, force=True, invalidation_mode=_UNCHECKED)


def _install(interpreter: Path, packages: Path, requirements: list[str]) -> None:
    options = ["--target", str(packages), "--only-binary", ":all:", *requirements]
    commands = [[*installer, *options] for installer in _installers(interpreter)]
    if not commands:
        raise MachineError(f"Neither uv nor pip is there for {interpreter}; install one of them, they fetch packages.")
    result = subprocess.run(commands[0], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        tail = (result.stderr or result.stdout).strip()[-600:]
        raise MachineError(f"packages cannot be installed with `{' '.join(commands[0][:4])} …`: {tail}")
    shutil.rmtree(packages / "bin", ignore_errors=True)


def _installers(interpreter: Path) -> list[list[str]]:
    """Return candidate command lines up to the options; the first one is used."""
    found: list[list[str]] = []
    uv = shutil.which("uv")
    if uv:
        found.append([uv, "pip", "install", "--quiet", "--python", str(interpreter)])
    quiet = ["install", "--quiet", "--disable-pip-version-check", "--no-input"]
    probe = subprocess.run([str(interpreter), "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        found.append([str(interpreter), "-m", "pip", *quiet])
    found += [[str(interpreter), f"{wheel}/pip", *quiet] for wheel in _bundled_pip()]
    return found


def _bundled_pip() -> list[Path]:
    """Return the pip wheels bundled with a Python that has ensurepip; pip runs from a wheel without being installed."""
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return []
    directories = [Path(spec.origin).parent / "_bundled", Path("/usr/share/python-wheels")]
    return [wheel for directory in directories for wheel in sorted(directory.glob("pip-*.whl"))]


def _compile(layer: Path) -> None:
    """Compile to unchecked byte code: a read-only layer never changes, so imports need not compare time stamps."""
    compileall.compile_dir(
        str(layer / "lib"),
        quiet=2,
        force=True,
        stripdir=str(layer),
        prependdir=PYTHON_LAYER_PATH,
        invalidation_mode=_UNCHECKED,
    )


def _check(layer: Path) -> None:
    """Run the copy with an empty environment; an error here would occur in every box."""
    command = [str(layer / "bin" / "python3"), "-B", "-m", "pytest", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={}, cwd="/")
    if result.returncode != 0:
        tail = (result.stderr or result.stdout).strip()[-600:]
        raise MachineError(
            f"A copy of {sys.base_prefix} does not run: {tail}; use an interpreter from uv or the system."
        )
