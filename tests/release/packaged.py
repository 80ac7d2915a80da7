"""What is in a wheel and in a source distribution, and what is not.

python packaged.py FOLDER: of the two files in it
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

EXTRAS = {"torch", "hf", "jax", "store", "ray", "transformers", "accelerate", "lightning", "trl", "demo", "cli"} | {
    "media",
    "delta",
    "iceberg",
    "lance",
}
PAGES = {f"midepoch/tools/report/{name}" for name in ("page.html", "page.css", "page.js", "draw.js")}
KERNEL = {"midepoch/_native/kernel.native.so", "midepoch/_native/kernel.native.dll"}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def check_wheel(wheel: Path) -> str:
    """The version of a wheel that holds the packages, their types and the license, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    about = metadata(wheel)
    version = str(about["Version"])
    own = f"midepoch-{version}.dist-info"
    assert {name.split("/")[0] for name in names} == {"midepoch", "fast_hf_loader_simple", own}
    assert {"midepoch/py.typed", "fast_hf_loader_simple/py.typed", f"{own}/licenses/LICENSE"} <= set(names)
    code = [name for name in names if not name.startswith(own)]
    others = set(code) - PAGES - KERNEL
    assert all(name.endswith((".py", "/py.typed")) for name in others), "something that is no code is packed"
    assert set(code) >= PAGES
    assert bool(KERNEL & set(code)) == (not wheel.name.endswith("-py3-none-any.whl")), "a tag without its library"
    assert not [name for name in code if "test_" in name or "conftest" in name]
    sources = Path(__file__).parents[2] / "src"
    there = {str(path.relative_to(sources)) for path in sources.rglob("*.py")}
    assert {name for name in code if name.endswith(".py")} == there, "the wheel is not of these sources"
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert set(about.get_all("Provides-Extra") or ()) == EXTRAS
    core = [one for one in about.get_all("Requires-Dist") or () if "extra ==" not in one]
    assert {one.split(">")[0] for one in core} == {"numpy", "pyarrow"}, core
    return version


def check_sdist(sdist: Path) -> None:
    """Enough to build the wheel, and to test what was built."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO", "SECURITY.md"):
        assert name in names, name
    assert {"src/midepoch/py.typed", "tests/conftest.py", "constraints.txt"} <= names
    assert {"hatch_build.py", "src/midepoch/_native/kernel.c"} <= names
    assert not [name for name in names if "kernel.native" in name], "a library of one machine"
    assert not [name for name in names if name.startswith((".git/", ".ci", ".venv", "dist/"))]


def check(folder: Path) -> str:
    """The version of all wheels in a folder, and of its source distribution."""
    (sdist,) = folder.glob("*.tar.gz")
    check_sdist(sdist)
    (version,) = {check_wheel(wheel) for wheel in folder.glob("*.whl")}
    return version


if __name__ == "__main__":
    print(f"midepoch {check(Path(sys.argv[1]))}: wheels and source distribution hold what they should")
