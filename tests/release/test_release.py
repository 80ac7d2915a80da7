"""The package as others get it. Each extra alone, in an environment of its own: scripts/release."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import packaged
import pytest

import midepoch

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
    left_out = {"hatchling", "torch"}  # to build with; no old build without CUDA
    assert set(declared) - left_out <= set(pinned)
    for name in set(declared) - left_out:
        assert (pinned[name] + ".").startswith(declared[name] + "."), f"{name}: {declared[name]} and {pinned[name]}"
