"""from_generator: the function runs once for everyone, and never again until it changes."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from midepoch.dataset import parts
from midepoch.testing import assert_resumes_exactly


def count_of_runs(path: Path) -> int:
    return len(path.read_text()) if path.exists() else 0


def squares(n: int, log: str, power: int = 2) -> Iterator[dict[str, Any]]:
    with open(log, "a") as file:
        file.write("x")
    for i in range(n):
        yield {"i": i, "square": i**power, "late": None if i < 1500 else f"text {i}", "noise": random.random()}


def test_rows_are_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    log = tmp_path / "log"

    def make(n: int = 2600, **options: Any) -> midepoch.Dataset:
        return midepoch.from_generator(
            squares, gen_kwargs={"n": n, "log": str(log)}, cache_dir=tmp_path / "rows", **options
        )

    state = random.getstate()
    ds = make()
    assert random.getstate() == state
    assert len(ds) == 2600 and ds.num_files > 1 and ds.schema.field("late").type == pa.string()
    assert ds[1499]["late"] is None and ds[2599] == {
        "i": 2599,
        "square": 2599**2,
        "late": "text 2599",
        "noise": ds[2599]["noise"],
    }
    expected = list(ds)
    assert list(make()) == expected and count_of_runs(log) == 1
    assert len(make(3)) == 3 and count_of_runs(log) == 2
    assert list(make(key="v1")) == expected  # draws are seeded: the same in every run
    assert list(make(5, key="v1")) == expected and count_of_runs(log) == 3
    assert make(4, schema={"i": "int16"}).schema.field("i").type == pa.int16()
    assert_resumes_exactly(lambda: make(7).shuffle(seed=1).loader(2, num_workers=0))


def test_tables_and_other_values(tmp_path: Path) -> None:
    def tables() -> Iterator[Any]:
        yield {"a": 1, "b": np.ones(2)}
        yield pa.table({"a": [2, 3], "b": [[1.0], []]})
        yield pa.record_batch({"a": [4], "b": [[2.0]]})
        yield {"a": 5, "b": None}

    ds = midepoch.from_generator(tables, cache_dir=tmp_path)
    assert [row["a"] for row in ds] == [1, 2, 3, 4, 5] and ds[0]["b"] == [1.0, 1.0]

    def fails() -> Iterator[Any]:
        yield {"a": 1}
        raise OSError("the disk is gone")

    lock = threading.Lock()

    def locked() -> Iterator[Any]:
        with lock:
            yield {"a": 1}

    cases: list[tuple[type[Exception], str, Any]] = [
        (midepoch.MapError, "fails failed after it had yielded 1: OSError: the disk is gone", fails),
        (midepoch.MapError, "must yield a dict.*It yielded int as row 0", lambda: iter([5])),
        (midepoch.DataNotFoundError, "yields no rows", lambda: iter([])),
        (midepoch.MapError, "it must yield rows, but returned NoneType", lambda: None),
        (midepoch.MidepochError, r"because it uses .*lock.*key='v1'", locked),
        (midepoch.ColumnError, "column 'a'", lambda: iter([{"a": 1}, {"a": "x"}])),
        (
            midepoch.ColumnError,
            "'b', others do not.*None for a missing value",
            lambda: ({"a": i} if i < parts.ROWS else {"a": i, "b": i} for i in range(parts.ROWS + 1)),
        ),
        (TypeError, "Pass the function itself", tables()),
        (TypeError, "Pass the function itself", iter([{"a": 1}])),
        (TypeError, "from_list", [{"a": 1}]),
        (TypeError, "function that yields rows", 5),
    ]
    for kind, text, given in cases:
        with pytest.raises(kind, match=text):
            midepoch.from_generator(given, cache_dir=tmp_path)
    with pytest.raises(TypeError, match="dict of arguments by name, got \\[1\\]"):
        midepoch.from_generator(tables, gen_kwargs=[1], cache_dir=tmp_path)  # type: ignore[arg-type]
    assert len(midepoch.from_generator(locked, key="v1", cache_dir=tmp_path)) == 1
    assert not list(tmp_path.glob(".*.tmp"))
    Path(ds.pipeline.base.source.files[0].path).unlink()  # it may have taken hours: never removed without being asked
    with pytest.raises(midepoch.MidepochError, match="To compute it again, delete"):
        midepoch.from_generator(tables, cache_dir=tmp_path)


def test_a_row_may_be_written_to_for_the_next_one(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        row: dict[str, Any] = {"array": np.zeros(2), "list": []}
        for i in range(3):
            row["i"] = i
            row["array"][:] = i
            row["list"].append(i)
            yield row

    ds = midepoch.from_generator(rows, cache_dir=tmp_path)
    assert list(ds) == [{"array": [i, i], "list": list(range(i + 1)), "i": i} for i in range(3)]


OTHER = """
import sys, time
import midepoch

def rows(log):
    with open(log, "a") as file:
        file.write("x")
    time.sleep(0.5)
    for i in range(10):
        yield {"i": i}

ds = midepoch.from_generator(rows, gen_kwargs={"log": sys.argv[1]}, cache_dir=sys.argv[2])
print(ds["i"][:])
"""


def test_other_processes_wait_for_the_first(tmp_path: Path, python: str) -> None:
    command = [python, "-c", OTHER, str(tmp_path / "log"), str(tmp_path / "rows")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert said == [f"{list(range(10))}\n"] * 3
    assert count_of_runs(tmp_path / "log") == 1
