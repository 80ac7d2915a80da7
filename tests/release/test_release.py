"""The package as others get it. Each extra alone, in an environment of its own: scripts/release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import packaged
import pytest

import midepoch
import native
from midepoch._native import library

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # The wheel is built from the source distribution: what is not in that is not in either.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_wheel_and_sdist_hold_what_they_should(built: Path) -> None:
    assert packaged.check(built) == midepoch.__version__


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "none"])
def test_a_wheel_has_the_kernel_if_there_is_a_compiler(compiler: bool, tmp_path: Path) -> None:
    if compiler and native.compiled() is None:
        pytest.skip("no C compiler")
    wheel = tmp_path / build_in(ROOT, "wheel", tmp_path, compiler)
    assert wheel.name.endswith("-py3-none-any.whl") == (not compiler)
    packaged.check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Root-Is-Purelib: {str(not compiler).lower()}" in archive.read(about).decode()
    assert (library.load(tmp_path / "installed" / "midepoch" / "_native" / library.NAME) is not None) == compiler
    assert native.hook().NAME == library.NAME


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "none"])
def test_an_editable_installation_has_the_kernel_beside_its_source(compiler: bool, tmp_path: Path) -> None:
    if compiler and native.compiled() is None:
        pytest.skip("no C compiler")
    root = tmp_path / "root"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        root.mkdir(exist_ok=True)
        if (ROOT / name).exists():  # the source distribution may have no .gitignore
            shutil.copy(ROOT / name, root)
    leave = shutil.ignore_patterns("__pycache__", library.NAME)
    shutil.copytree(ROOT / "src", root / "src", ignore=leave)
    wheel = tmp_path / build_in(root, "editable", tmp_path, compiler)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "kernel" in name], "the source tree has it"
    built = root / "src" / "midepoch" / "_native" / library.NAME
    assert (library.load(built) is not None) == compiler
    assert sorted(path.name for path in built.parent.glob("kernel*")) == sorted(
        ["kernel.c", *[library.NAME] * compiler]
    )


def build_in(root: Path, kind: str, folder: Path, compiler: bool) -> str:
    """Build a wheel with hatchling, with the compilers of this machine or without any. Return its name."""
    environment = dict(os.environ)
    if not compiler:
        environment |= {"PATH": str(folder / "nothing"), "CC": "/nonexistent"}
    script = f"import hatchling.build as h; print(h.build_{kind}({str(folder)!r}))"
    if not compiler:  # zig may be installed
        script = f"import sys; sys.modules['ziglang'] = None; {script}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_core_alone(built: Path, tmp_path: Path) -> None:
    """The wheel, where there is nothing but numpy and pyarrow: data is loaded, saved and resumed."""
    (wheel,) = built.glob("*.whl")
    target, others = tmp_path / "installed", tmp_path / "others"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True, timeout=300)
    others.mkdir()
    packages = Path(sysconfig.get_path("platlib"))
    for name in ("numpy", "numpy.libs", "pyarrow", "pyarrow.libs"):
        if (packages / name).exists():
            (others / name).symlink_to(packages / name)
    script = tmp_path / "smoke.py"  # not beside the tests, which would be found then
    script.write_text(Path(__file__).with_name("smoke.py").read_text())
    environment = {"PYTHONPATH": f"{target}:{others}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", str(script), "core"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "  core: ok\n", done.stderr
    assert (target / "bin" / "midepoch").exists()
    asked = "import sys; from midepoch.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", asked], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert re.search(r'requires (typer|rich): pip install "midepoch\[cli\]"', done.stderr)


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)(?: \(([^)]+)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings, "no entry"
    version, when = headings[0]
    assert version == midepoch.__version__
    assert when == "unreleased" or re.fullmatch(r"\d{4}-\d{2}-\d{2}", when)
    numbers = [tuple(map(int, version.split("."))) for version, _ in headings]
    assert all(len(number) == 3 for number in numbers), "MAJOR.MINOR.PATCH"
    assert numbers == sorted(set(numbers), reverse=True)


def test_every_extra_has_a_smoke_test() -> None:
    import smoke

    declared = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert declared is not None
    assert set(smoke.EXTRAS) == set(re.findall(r"^(\w+) =", declared[1], re.M))


def test_minimum_constraints_are_the_bounds_that_are_declared() -> None:
    declared = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-minimum.txt").read_text(), re.M))
    left_out = {"hatchling", "torch", "trl"}  # to build with; no old build without CUDA; needs a newer datasets
    assert set(declared) - left_out <= set(pinned)
    for name in set(declared) - left_out:
        assert (pinned[name] + ".").startswith(declared[name] + "."), f"{name}: {declared[name]} and {pinned[name]}"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").iterdir() if path.name != "help"))
def test_the_help_of_a_script_installs_nothing(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for tool in ("python3", "pip", "timeout", "apt-get"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\ntouch {tmp_path}/used\nexit 1\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable] if name == "prose" else []
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for option in ("--help", "-h"):
        done = subprocess.run([*command, f"scripts/{name}", option], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 5
        assert sorted(tmp_path.rglob("*")) == before
