"""The front of the house: names, import cost, the demo."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import midepoch
from forks import PYTHON


def test_export_list() -> None:
    assert set(midepoch.__all__) == {
        "CheckpointDamagedError",
        "CheckpointError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "CheckpointSaveError",
        "ColumnError",
        "CorruptBlockError",
        "DataChangedError",
        "DataError",
        "DataNotFoundError",
        "Dataset",
        "DifferentSchemasError",
        "FetchError",
        "FormatError",
        "Keep",
        "Lease",
        "LeaseError",
        "Loader",
        "MapError",
        "MidepochError",
        "Phase",
        "PipelineCheckpoint",
        "Retry",
        "Schedule",
        "StateError",
        "StructuredDataset",
        "WorkerError",
        "WorldError",
        "__version__",
        "concat",
        "concatenate_datasets",
        "from_arrow",
        "from_delta",
        "from_dict",
        "from_files",
        "from_generator",
        "from_hf",
        "from_iceberg",
        "from_lance",
        "from_list",
        "from_map_style",
        "from_megatron",
        "from_pandas",
        "from_tokens",
        "interleave_datasets",
        "load_dataset",
        "load_from_disk",
        "mix",
    }
    for name in (*midepoch.__all__, "zip"):
        assert getattr(midepoch, name) is not None
    assert len(set(midepoch.__all__)) == len(midepoch.__all__)
    assert dir(midepoch) == sorted(midepoch.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        midepoch.nothing  # noqa: B018


def test_a_star_hides_nothing_of_python() -> None:
    found: dict[str, object] = {}
    exec("from midepoch import *", found)
    assert set(found) - {"__builtins__"} == set(midepoch.__all__)
    assert not set(midepoch.__all__) & set(dir(builtins))


def test_type_checkers_see_what_there_is() -> None:
    """Names are imported when they are used; the imports that only a type checker reads are of the same ones."""
    assert midepoch.__file__ is not None
    tree = ast.parse(Path(midepoch.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == midepoch._WHERE
    assert set(seen) == {*midepoch.__all__, "zip"} - {"__version__"}


def test_every_name_is_documented() -> None:
    for name in {*midepoch.__all__, "zip"} - {"__version__"}:
        value = getattr(midepoch, name)
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text().partition("\n## Modules")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| [`")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] + re.findall(r"And `(\w+)`", page)
    assert sorted(named) == sorted({*midepoch.__all__, "zip"}), "docs/api.md names each public name once"


def test_import_is_light() -> None:
    code = "import sys, midepoch; print([m for m in ('numpy', 'pyarrow', 'torch', 'datasets', 'pandas', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_datasets_and_streams_do_not_import_what_few_use() -> None:
    """pyarrow.compute takes 50 ms, and a client of HTTP 20 ms: filters by an expression and the Hub need them."""
    code = """
import sys, midepoch.open.files, midepoch.dataset.combine
few = ("pyarrow.compute", "torch", "pandas", "http.client", "urllib.request", "email.utils", "huggingface_hub", "httpx")
print([name for name in few if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_a_first_batch_does_not_import_it_either(small_files: list[str]) -> None:
    code = """
import sys, midepoch
ds = midepoch.from_files(sys.argv[1:]).shuffle(seed=1)
for kind in ("numpy", "python", "arrow"):
    next(iter(ds.with_format(kind).loader(8)))
print([m for m in ('pyarrow.compute', 'torch', 'pandas') if m in sys.modules])
"""
    command = [sys.executable, "-c", code, *small_files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_every_error_is_in_the_tree() -> None:
    from midepoch import errors

    classes = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    assert all(issubclass(each, errors.MidepochError) for each in classes)
    assert errors.__doc__ is not None
    assert all(each.__name__ in errors.__doc__ for each in classes)
    assert {each.__name__ for each in classes} <= set(midepoch.__all__)


def proves_it(python: str, rows: int) -> bool:
    command, environment = [python, "-m", "midepoch.demo", f"--rows={rows}"], {**os.environ, PYTHON: python}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return "bit for bit those of the uninterrupted run: yes" in done.stdout


def test_demo_proves_it(python: str) -> None:
    """In forks; ``tests/release`` and ``-m slow`` have it in processes of their own, which all import torch."""
    assert proves_it(python, 6_000)


@pytest.mark.slow
def test_a_larger_demo_proves_it() -> None:
    assert proves_it(sys.executable, 24_000)
