"""Types of the public interface: what a type checker finds, and what an editor completes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import midepoch
from midepoch.loader.options import HINTED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # scripts/check has it with all other types, without another process
def test_a_type_checker_finds_the_types() -> None:
    pytest.importorskip("mypy")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "tests/types/uses.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


def public() -> list[tuple[str, Any]]:
    found = []
    for name in (*midepoch.__all__, "zip"):
        value = getattr(midepoch, name)
        if isinstance(value, type) and issubclass(value, Exception):
            continue
        if isinstance(value, type):
            members = {key: inspect.getattr_static(value, key) for key in dir(value) if not key.startswith("_")}
            functions = {key: each for key, each in members.items() if inspect.isfunction(each)}
            found += [(f"{name}.{key}", each) for key, each in functions.items() if _ours(each)]
        elif callable(value) and _ours(value):
            found.append((name, value))
    return found


def _ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("midepoch")


def test_every_signature_is_typed_and_documented() -> None:
    """Editors show signatures as ``inspect`` does: with names, types and a docstring, whatever is around a function."""
    assert len(public()) > 80
    for name, function in public():
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
        assert all(each.annotation is not each.empty for each in own), name
        assert signature.return_annotation is not signature.empty, name
        assert function.__doc__, name
        kinds = {each.kind for each in own}
        assert inspect.Parameter.VAR_KEYWORD not in kinds or name in ("load_dataset", "Dataset.tokenize"), name


def test_every_public_function_explains_arguments_that_it_does_not_have() -> None:
    plain = ("load_dataset", "Dataset.tokenize")  # their options are passed on
    for name, function in public():
        if name in plain or (name.startswith("Loader.") and name.split(".")[1] not in HINTED):
            continue
        count = sum(each in ("self", "cls") for each in inspect.signature(function).parameters)
        with pytest.raises(TypeError) as caught:
            function(*[object()] * count, not_an_argument=1)
        assert "has no argument 'not_an_argument'. " in str(caught.value), (name, str(caught.value))
