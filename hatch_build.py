"""Build hook: compiles the native kernel into the wheel. Without a compiler the wheel is pure Python.

``python hatch_build.py`` builds the kernel inside the source tree, as an editable installation does.
``MIDEPOCH_WHEEL=aarch64`` (or x86_64) builds a wheel for Linux on that architecture, on any machine, with zig.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("midepoch", "_native")
SOURCE = Path(__file__).parent / "src" / PACKAGE / "kernel.c"
NAME = "kernel.native.dll" if sys.platform == "win32" else "kernel.native.so"
# -O3 but not -march=native: a wheel must run on every CPU of its platform.
FLAGS = ["-std=c99", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
_TIMEOUT = 120  # seconds: zig builds its own C library first
TARGETS = {"x86_64": 62, "aarch64": 183}
"""Architectures of wheels for Linux, and their numbers in the header of a library (``e_machine`` of ELF)."""
_GLIBC = (2, 17)
"""The oldest C library of manylinux wheels that are built for a named architecture."""


def target() -> str | None:
    """Return the architecture that was asked for, or None for this machine."""
    found = os.environ.get("MIDEPOCH_WHEEL") or None
    if found is not None and found not in TARGETS:
        raise ValueError(f"MIDEPOCH_WHEEL must be one of {', '.join(TARGETS)}, got {found!r}")
    return found


class KernelHook(BuildHookInterface):
    """Adds the compiled kernel to a wheel, or puts it beside its source for an editable installation."""

    PLUGIN_NAME = "custom"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            if not build(SOURCE.with_name(NAME)):
                self.app.display_warning("no C compiler: midepoch uses numpy instead of its kernel")
            return
        self._folder = tempfile.mkdtemp()
        library = Path(self._folder, NAME)
        if not build(library):
            if target() is not None:
                raise RuntimeError(f"no kernel for {target()}: install ziglang, and build without isolation")
            self.app.display_warning("no C compiler: a pure wheel, in which numpy does the work of the kernel")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["force_include"][str(library)] = (PACKAGE / NAME).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def compilers() -> list[list[str]]:
    """Return the commands to try: $CC, cc, and zig if the package ziglang is installed."""
    if (wanted := target()) is not None:
        version = ".".join(map(str, _GLIBC))
        return [[sys.executable, "-m", "ziglang", "cc", "-target", f"{wanted}-linux-gnu.{version}"]]
    found = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found.append(["cc"])
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def build(library: Path) -> bool:
    """Compile the kernel with the first compiler that can. Return False if none can."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, NAME)
        for compiler in compilers():
            if shutil.which(compiler[0]) is None:
                continue
            command = [*compiler, *FLAGS, *_mac_flags(), "-o", str(made), str(SOURCE)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT)
                _check(made)
            except (OSError, subprocess.SubprocessError) as problem:
                print(f"{shlex.join(compiler)} cannot build the kernel: {_reason(problem)}", file=sys.stderr)  # noqa: T201
                continue
            # A new file: a process may have loaded the old one.
            shutil.copy(made, library.with_suffix(".new"))
            os.replace(library.with_suffix(".new"), library)
            return True
    return False


def _check(library: Path) -> None:
    """Raise OSError if a library is for another platform: a compiler may make what this Python cannot load."""
    if (wanted := target()) is None:
        ctypes.CDLL(str(library))
        return
    header = library.read_bytes()[:20]
    if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != TARGETS[wanted]:
        raise OSError(f"the library is not for {wanted}")


def _reason(problem: Exception) -> str:
    output = getattr(problem, "stderr", None)
    return output.decode(errors="replace").strip()[-500:] if output else str(problem)


def _mac_version() -> str:
    lowest = "11.0" if platform.machine() == "arm64" else "10.13"
    return os.environ.get("MACOSX_DEPLOYMENT_TARGET") or lowest


def _mac_flags() -> list[str]:
    """One architecture, that of this process, even if Python itself is universal."""
    if sys.platform != "darwin" or target() is not None:
        return []
    return ["-arch", platform.machine(), f"-mmacosx-version-min={_mac_version()}"]


def _platform_tag() -> str:
    if (wanted := target()) is not None:
        return f"manylinux_{_GLIBC[0]}_{_GLIBC[1]}_{wanted}"
    if sys.platform == "darwin":
        major, minor = [*_mac_version().split("."), "0"][:2]
        return f"macosx_{major}_{minor}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    sys.exit(not build(SOURCE.with_name(NAME)))
