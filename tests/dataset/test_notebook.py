"""A dataset in a notebook: its first rows, and names of types that people know."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import midepoch


def test_rows_are_shown_in_the_order_of_the_epoch() -> None:
    ds = midepoch.from_dict({"id": list(range(5)), "text": [f"<{n}>" * 40 for n in range(5)]}).shuffle(seed=1)
    text, position = ds._repr_html_(), ds.position
    shown = [f"{html_of(row['text'])[:20]}" for row in ds]
    assert [each in text for each in shown] == [True] * 3 + [False] * 2
    assert "…" in text and "<0>" not in text and position == 0


def html_of(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


def test_images_are_thumbnails(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(np.full((300, 200, 3), number, np.uint8)).save(tmp_path / f"{number % 2}" / f"{number}.png")
    text = midepoch.from_files(tmp_path)._repr_html_()
    assert "image (Image), label (ClassLabel)" in text
    assert text.count('<img alt="" src="data:image/png;base64,') == 3 and len(text) < 20_000
    (tmp_path / "0" / "0.png").write_bytes(b"no image")
    assert midepoch.from_files(tmp_path, force_reindex=True)._repr_html_().count("<img") == 2


def test_a_preview_runs_no_function_and_raises_nothing(tmp_path: Path) -> None:
    calls: list[int] = []
    ds = midepoch.from_dict({"id": [1, 2]})
    assert "<th" in ds._repr_html_() and "<th" not in ds.map(calls.append)._repr_html_() and not calls
    assert "<th" not in ds.filter(lambda row: row["id"] > 1)._repr_html_()
    assert "<th" not in ds.take(0)._repr_html_()
    pq.write_table(pa.table({"id": np.arange(1000)}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    opened = midepoch.from_files(tmp_path)
    (tmp_path / "a.parquet").unlink()
    assert "1,000 in 1 file" in opened._repr_html_()


def test_signatures_show_no_addresses() -> None:
    for owner in (midepoch, midepoch.Dataset, midepoch.Loader):
        for name in vars(owner) if owner is midepoch else dir(owner):
            each = inspect.getattr_static(owner, name)
            is_error = isinstance(each, type) and issubclass(each, Exception)  # some have no signature
            if callable(each) and not name.startswith("_") and not is_error:
                assert " object at 0x" not in str(inspect.signature(each)), name


def test_python_adds_nothing_to_a_hint() -> None:
    """A traceback of Python suggests names that are near, also those that do not help."""
    for expression, end in [("midepoch.Dataset.from_csv", "'*.csv')."), ("midepoch.from_dict({'a': [1]}).head", ".")]:
        ran = subprocess.run([sys.executable, "-c", f"import midepoch; {expression}"], capture_output=True, text=True)
        assert ran.stderr.rstrip().endswith(end) and "Did you mean: " not in ran.stderr
