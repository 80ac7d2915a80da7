"""The front of the house: names, import cost, the demo."""

from __future__ import annotations

import subprocess
import sys

import pytest

import midepoch


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
        "FetchError",
        "FormatError",
        "Keep",
        "Loader",
        "MapError",
        "MidepochError",
        "PipelineCheckpoint",
        "Retry",
        "StateError",
        "Stream",
        "StreamLoader",
        "StructuredDataset",
        "WorkerError",
        "WorldError",
        "__version__",
        "concat",
        "from_files",
        "load_dataset",
        "load_from_disk",
        "mix",
    }
    for name in (*midepoch.__all__, "zip"):
        assert getattr(midepoch, name) is not None


def test_import_is_light() -> None:
    code = "import sys, midepoch; print([m for m in ('numpy', 'pyarrow', 'torch', 'datasets', 'pandas', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_datasets_and_streams_do_not_import_what_few_use() -> None:
    """pyarrow.compute takes 50 ms: only who filters by an expression needs it, and has imported it then."""
    code = "import sys, midepoch.load, midepoch.stream; print([m for m in ('pyarrow.compute', 'torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_is_in_the_tree() -> None:
    from midepoch import errors

    classes = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    assert all(issubclass(each, errors.MidepochError) for each in classes)
    assert errors.__doc__ is not None
    assert all(each.__name__ in errors.__doc__ for each in classes)


@pytest.mark.parametrize("rows", [6_000, pytest.param(24_000, marks=pytest.mark.slow)])
def test_demo_proves_it(rows: int) -> None:
    command = [sys.executable, "-m", "midepoch.demo", f"--rows={rows}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit those of the uninterrupted run: yes" in done.stdout
