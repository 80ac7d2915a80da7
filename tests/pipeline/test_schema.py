"""One schema for all parts of a mix: what a row is depends on no other row, chunk or resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from data import write_arrow
from midepoch.audit import read_run
from midepoch.errors import ColumnError

ROWS = 90


def opened(folder: Path, name: str, table: pa.Table, format: str = "arrow") -> midepoch.Dataset:
    path = folder / f"{name}.{format}"
    if format == "arrow":
        write_arrow(path, table, 7)
    else:
        pq.write_table(table, path, row_group_size=7)
    return midepoch.from_files(path, index_dir=folder / "ix")


def described(value: Any) -> Any:
    """A batch with its types spelled out, to be compared."""
    if isinstance(value, dict):
        return {name: described(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [described(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return (type(value).__name__, value)


def dtypes(batches: list[Any]) -> set[Any]:
    def kind(value: Any) -> Any:
        if isinstance(value, list):
            return ("list", frozenset(map(kind, value)))
        return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__

    return {tuple((name, kind(column)) for name, column in batch.items()) for batch in batches}


def same_after_every_resume(make: Callable[[], Any]) -> list[Any]:
    """All batches; those after a resume from any of them are the same, to the bit and to the type."""
    whole, states, batches = [], [], []
    loader = make()
    for batch in loader:
        batches.append(batch)
        whole.append(described(batch))
        states.append(loader.state_dict())
    for step, state in list(enumerate(states[:-1]))[:: max(1, len(states) // 12)]:
        again = make()
        again.load_state_dict(state)
        iterator = iter(again)
        assert [described(next(iterator)) for _ in whole[step + 1 : step + 4]] == whole[step + 1 : step + 4], step
    return batches


def numbers(start: int, kind: pa.DataType | None = None, **more: Any) -> pa.Table:
    ids = np.arange(start, start + ROWS)
    return pa.table({"id": pa.array(ids, kind or pa.int32()), "x": pa.array(ids / 2, pa.float32()), **more})


PARTS: dict[str, Callable[[Path], list[Any]]] = {
    "a function beside what is read": lambda f: [
        opened(f, "a", numbers(0)).map(lambda row: {"x": row["x"] * 2, "id": row["id"]}),
        opened(f, "b", numbers(1000)),
    ],
    "a batched function that makes arrays": lambda f: [
        opened(f, "a", numbers(0)).map(lambda rows: {"x": np.array(rows["x"]) * 2}, batched=True, batch_size=5),
        opened(f, "b", numbers(1000)),
    ],
    "tensors": lambda f: [
        opened(f, "a", numbers(0)).with_format("torch").map(lambda row: {"x": torch.tensor(0.25)}).with_format(None),
        opened(f, "b", numbers(1000)),
    ],
    "nulls in one": lambda f: [
        opened(f, "a", numbers(0)),
        opened(f, "b", numbers(1000).set_column(0, "id", pa.array([None, *range(ROWS - 1)], pa.int32()))),
    ],
    "nulls in one, of two formats": lambda f: [
        opened(f, "a", numbers(0), "parquet"),
        opened(f, "b", numbers(1000).set_column(0, "id", pa.array([None, *range(ROWS - 1)], pa.int32()))),
    ],
    "integers of two widths": lambda f: [opened(f, "a", numbers(0)), opened(f, "b", numbers(1000, pa.int64()))],
    "filtered": lambda f: [
        opened(f, "a", numbers(0)).filter(lambda row: row["id"] % 3),
        opened(f, "b", numbers(1000, pa.int64())).filter(lambda row: row["id"] % 2),
    ],
}


@pytest.mark.parametrize("combine", ["mix", "concat", "mix of mix"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_types_are_the_same_in_every_batch_and_after_every_resume(
    tmp_path: Path, parts: Callable[[Path], list[Any]], combine: str
) -> None:
    found = parts(tmp_path)
    if combine == "mix":
        stream = midepoch.mix(found, weights=[1, 3], seed=2, stop="all")
    elif combine == "concat":
        stream = midepoch.concat(found)
    else:
        stream = midepoch.mix([midepoch.mix(found, weights=[1, 3], seed=2), found[1]], seed=1)
    batches = same_after_every_resume(lambda: stream.with_format("numpy").loader(8))
    assert len(dtypes(batches)) == 1, dtypes(batches)
    assert len(dtypes(list(stream.with_format("torch").loader(8)))) == 1


def test_types_of_functions_alone_depend_on_the_rows_of_a_batch_only(tmp_path: Path) -> None:
    """What functions make, only running tells: batches are joined for themselves, whatever was made together."""
    a = opened(tmp_path, "a", numbers(0)).map(lambda row: {"y": row["id"] / 3})
    b = opened(tmp_path, "b", numbers(1000)).map(
        lambda rows: {"y": np.array(rows["id"], np.float32)}, batched=True, batch_size=4
    )
    mixed = midepoch.mix([a, b], weights=[1, 4], seed=2, stop="all").with_format("numpy")
    same_after_every_resume(lambda: mixed.loader(3))
    same_after_every_resume(lambda: mixed.map(lambda row: {"z": row["y"] + row["x"]}).loader(3))
    same_after_every_resume(lambda: mixed.filter(lambda row: row["y"] % 2 < 1).loader(3))
    twice = mixed.flat_map(lambda row: [{"y": row["y"]}, {"y": row["y"] * row["x"].dtype.itemsize}])
    same_after_every_resume(lambda: twice.loader(3))
    cast = same_after_every_resume(lambda: mixed.cast({"y": "float32"}).loader(3))
    assert dtypes(cast) == {(("id", "int32"), ("x", "float32"), ("y", "float32"))}


def test_empty_lists_have_the_type_of_the_others(tmp_path: Path) -> None:
    lists = pa.array([[i] * (i % 3) for i in range(ROWS)], pa.list_(pa.int64()))
    a = opened(tmp_path, "a", pa.table({"ids": lists})).map(lambda row: {"ids": row["ids"][1:]})
    b = opened(tmp_path, "b", pa.table({"ids": lists}))
    batches = same_after_every_resume(lambda: midepoch.mix([a, b], seed=1).with_format("numpy").loader(5))
    assert {str(row.dtype) for batch in batches for row in batch["ids"]} == {"int64"}


def test_formats_of_files_do_not_matter(tmp_path: Path) -> None:
    """Parquet calls the items of lists element, Arrow item; and there are large strings and lists beside the others."""
    made = {
        "ids": pa.array([[i, i] for i in range(ROWS)], pa.list_(pa.int32())),
        "text": pa.array([str(i) for i in range(ROWS)]),
        "deep": pa.array([{"a": [i], "b": i} for i in range(ROWS)]),
    }
    other = {
        "ids": pa.array([[i, i] for i in range(ROWS)], pa.large_list(pa.int64())),
        "text": pa.array([str(i) for i in range(ROWS)], pa.large_string()),
        "deep": pa.array([{"a": [i], "b": i, "c": "x"} for i in range(ROWS)]),
    }
    parts = [
        opened(tmp_path, "a", pa.table(made), "parquet"),
        opened(tmp_path, "b", pa.table(made)),
        opened(tmp_path, "c", pa.table(other)),
    ]
    for combined in (midepoch.mix(parts, seed=1), midepoch.concat(parts)):
        rows = list(combined)
        assert len(rows) == 3 * ROWS
        assert {(tuple(row["ids"]), row["text"], row["deep"]["b"]) for row in rows} == {
            ((i, i), str(i), i) for i in range(ROWS)
        }
        assert {table.schema for table in combined.with_format("arrow").loader(7)} == {
            pa.schema(
                {
                    "ids": pa.large_list(pa.int64()),
                    "text": pa.large_string(),
                    "deep": pa.struct({"a": pa.list_(pa.int64()), "b": pa.int64(), "c": pa.string()}),
                }
            )
        }


def test_what_has_no_type_in_common_is_refused_where_it_is_built(tmp_path: Path) -> None:
    a, b = opened(tmp_path, "a", numbers(0)), opened(tmp_path, "b", numbers(0, pa.float64()))
    for combine, use in ((midepoch.mix, lambda mixed: mixed.loader(4)), (midepoch.concat, lambda ds: ds)):
        with pytest.raises(ColumnError, match="'id' is int32 in source 0 and double in source 1.*cast"):
            use(combine([a, b]))
        assert len(list(combine([a.cast({"id": pa.float64()}), b]))) == 2 * ROWS


def test_a_function_that_does_not_make_the_type_is_named(tmp_path: Path) -> None:
    a = opened(tmp_path, "a", numbers(0)).map(lambda row: {"x": f"{row['x']}"})
    with pytest.raises(ColumnError, match="column 'x' .*str.* cannot become float.*cast"):
        list(midepoch.mix([a, opened(tmp_path, "b", numbers(0))]))


def test_concat_fills_columns_that_a_part_lacks(tmp_path: Path) -> None:
    a = opened(tmp_path, "a", numbers(0, label=pa.array(range(ROWS))))
    b = opened(tmp_path, "b", numbers(1000))
    rows = list(midepoch.concat([a, b]))
    assert [row["label"] for row in rows] == [*range(ROWS), *[None] * ROWS]
    batches = same_after_every_resume(lambda: midepoch.concat([a, b]).with_format("numpy").loader(7))
    assert {str(batch["label"].dtype) for batch in batches} == {"float64"}
    with pytest.raises(ColumnError, match="same columns"):
        midepoch.mix([a, b]).loader(4)


def test_cast_makes_types_of_what_a_function_returns(tmp_path: Path) -> None:
    ds = opened(tmp_path, "a", numbers(0)).map(lambda row: {"n": row["id"], "v": [row["x"]] * 2, "s": str(row["id"])})
    made = ds.cast({"n": "int16", "v": pa.list_(pa.float32(), 2), "s": pa.large_string(), "id": np.uint8})
    table = next(iter(made.with_format("arrow").loader(9)))
    assert [str(table.schema.field(name).type) for name in ("n", "v", "s", "id")] == [
        "int16",
        "fixed_size_list<item: float>[2]",
        "large_string",
        "uint8",
    ]
    batch = next(iter(made.with_format("numpy").loader(9)))
    assert batch["v"].shape == (9, 2) and batch["v"].dtype == np.float32
    with pytest.raises(ColumnError, match="cast: no column 'none'"):
        list(ds.cast({"none": "int8"}))
    with pytest.raises(ColumnError, match="'n' .* cannot become int8"):
        list(opened(tmp_path, "b", numbers(200)).map(lambda row: {"n": row["id"]}).cast({"n": "int8"}))
    with pytest.raises(TypeError, match="integer"):
        ds.cast({"n": "integer"})


@pytest.mark.parametrize("combine", ["mix", "zip"])
def test_a_first_batch_costs_about_a_batch(tmp_path: Path, combine: str) -> None:
    """However many outputs a chunk may have, nothing far ahead is made before the first batch."""
    made = [0, 0]

    def counted(number: int) -> Callable[[Any], Any]:
        def count(row: Any) -> Any:
            made[number] += 1
            return {f"big{number * (combine == 'zip')}": b"x" * 100_000}

        return count

    table = pa.table({"id": np.arange(20_000)})
    parts = [
        opened(tmp_path, f"p{i}", table.rename_columns([f"id{i * (combine == 'zip')}"])).map(counted(i)) for i in (0, 1)
    ]
    stream = midepoch.mix(parts, seed=1) if combine == "mix" else midepoch.zip(parts)
    iterator = iter(stream.with_format("python").loader(4))
    next(iterator)
    assert max(made) <= 64
    for delivered in range(2, 60):
        next(iterator)
        rows = 4 * delivered // (2 if combine == "mix" else 1)
        assert max(made) <= rows + 250  # 25 MB: chunks of 4 MB, and a bundle for each part


@pytest.mark.parametrize("format", ["torch", "numpy", "arrow", "python"])
def test_tensors_and_numbers_go_together(tmp_path: Path, format: str) -> None:
    a = opened(tmp_path, "a", numbers(0))
    parts = [a.map(lambda row: {"x": torch.tensor(row["x"])}), a.map(lambda row: {"x": float(row["x"])})]
    for combined in (midepoch.mix(parts, seed=1), midepoch.concat(parts)):
        batches = list(combined.with_format(format).loader(4))
        found = [float(x) for batch in batches for x in (batch["x"].to_pylist() if format == "arrow" else batch["x"])]
        assert sorted(found) == sorted([i / 2 for i in range(ROWS)] * 2)


def sources_with_other_columns(tmp_path: Path) -> dict[str, Any]:
    """Two sources that agree only in ``text``."""
    texts = [f"{i} " * (1 + i % 7) for i in range(ROWS)]
    web = {"id": range(ROWS), "url": [f"u{i}" for i in range(ROWS)], "text": texts, "meta": [{"a": 1}] * ROWS}
    code = {"path": [f"p{i}" for i in range(ROWS)], "text": texts, "stars": range(ROWS), "id": ["x"] * ROWS}
    return {"web": opened(tmp_path, "web", pa.table(web)), "code": opened(tmp_path, "code", pa.table(code))}


class Bytes:
    """A tokenizer with a token for each byte."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [list(text.encode()) for text in texts]}


PIPELINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pack": lambda sources: midepoch.mix(sources, seed=1).tokenize(Bytes()).pack(16),
    "tokenized before": lambda s: midepoch.mix({n: d.tokenize(Bytes()) for n, d in s.items()}).pack(16),
    "mapped before": lambda s: midepoch.mix({n: d.map(tokens_of) for n, d in s.items()}).pack(16),
    "best fit": lambda sources: midepoch.mix(sources).tokenize(Bytes()).pack(16, strategy="best_fit", window=8),
    "shuffled": lambda sources: midepoch.mix(sources).shuffle(seed=2, window=8).tokenize(Bytes()).pack(16),
    "filtered": lambda s: midepoch.mix(s).filter(is_long, input_columns="text").tokenize(Bytes()).pack(16),
    "selected": lambda sources: midepoch.mix(sources, seed=1).select_columns("text"),
    "selected later": lambda sources: midepoch.mix(sources).shuffle(seed=2, window=8).select_columns(["text"]),
    "nested": lambda s: midepoch.mix([midepoch.mix(s).tokenize(Bytes()), s["web"].tokenize(Bytes())]).pack(16),
    "concat": lambda s: midepoch.concat([d.tokenize(Bytes()) for d in s.values()]).pack(16, strategy="best_fit"),
    "schedule": lambda s: midepoch.mix(
        {n: d.tokenize(Bytes()) for n, d in s.items()},
        midepoch.Schedule([midepoch.Phase("one", {"web": 1, "code": 1}, tokens=256, sequence_length=16)]),
    ).pack(),
}


def tokens_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["text"].encode())}


def is_long(text: str) -> bool:
    return len(text) > 2


@pytest.mark.parametrize("name", PIPELINES)
def test_columns_that_nothing_uses_may_differ(tmp_path: Path, name: str) -> None:
    made = PIPELINES[name](sources_with_other_columns(tmp_path)).with_format("python")
    batches = same_after_every_resume(lambda: made.loader(4, provenance=True))
    kind = "process" if name in ("pack", "best fit", "nested", "schedule") else "thread"
    workers = made.loader(4, num_workers=2, worker_type=kind, provenance=True)
    assert [described(batch) for batch in workers] == list(map(described, batches))
    assert len(list(made.loader(4, audit=tmp_path / "audit"))) == len(batches)
    run = read_run(tmp_path / "audit")
    assert run.exact and all(epoch.complete for epoch in run.epochs), (run.problems, run.epochs)


@pytest.mark.parametrize("step", [lambda ds: ds, lambda ds: ds.tokenize(Bytes())])
def test_columns_that_are_delivered_must_agree(tmp_path: Path, step: Callable[[Any], Any]) -> None:
    mixed = step(midepoch.mix(sources_with_other_columns(tmp_path)))
    assert "stars" not in repr(mixed) and "columns" in mixed._repr_html_()
    match = r"mix: source 0 has the columns id, url, .*, source 1 has .*\. Give them the same.*select_columns\(\['"
    for use in (lambda: mixed.loader(4), lambda: next(iter(mixed)), lambda: midepoch.mix([mixed, mixed]).loader(4)):
        with pytest.raises(ColumnError, match=match):
            use()
    with pytest.raises(ColumnError, match="pack: source 'web' of the mix: no column 'stars'"):
        mixed.pack(16, "stars")
