"""JSON arrays: the rows of ``json.load`` and of ``datasets``, wherever blocks end, and damage that is named."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest

import midepoch
from data import calls_of
from midepoch.errors import FormatError
from midepoch.sources.formats import lines
from midepoch.sources.formats.lines import elements
from midepoch.testing import assert_resumes_exactly
from pairs import alternating

TRAPS = ['"', "\\", '\\"', "}, {", "[[", "]", "\\\\", "é", "🙂", "\n", "a,b", '{"x": [1', "\t", ""]


def rows(count: int, draw: random.Random) -> list[dict[str, Any]]:
    def text() -> str:
        return "".join(draw.choices(TRAPS, k=draw.randrange(6)))

    return [
        {
            "id": i,
            "text": text(),
            text() + "key": text(),
            "list": [[j, None] for j in range(draw.randrange(3))],
            "inner": {"a": {"b": text()}, "c": [{"d": text()}] * draw.randrange(3)},
            "half": draw.choice([1, 2.5, None]),
        }
        for i in range(count)
    ]


def filled(found: Any, expected: Any) -> Any:
    """The expected value with nulls for the fields that only others have, as a table has them."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {key: filled(value, expected.get(key)) for key, value in found.items()}
    if isinstance(found, list) and isinstance(expected, list):
        return [filled(a, b) for a, b in zip(found, expected, strict=True)]
    return expected


def same(found: list[Any], expected: list[Any]) -> bool:
    names = {key for row in expected for key in row}
    return (
        len(found) == len(expected)
        and all(set(row) == names for row in found)
        and all(row == filled(row, wanted) for row, wanted in zip(found, expected, strict=True))
    )


WRITERS: dict[str, Callable[[list[Any]], str]] = {
    "compact": lambda data: json.dumps(data, separators=(",", ":")),
    "usual": json.dumps,
    "pretty": lambda data: "\ufeff \r\n" + json.dumps(data, indent=3, ensure_ascii=False) + "\n\n",
    "line by line": lambda data: "[\n" + ",\r\n".join(map(json.dumps, data)) + "\n]",
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 300)
    monkeypatch.setattr(lines, "_READ", 70)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("style", list(WRITERS))
def test_rows_are_those_of_json_load(style: str, tmp_path: Path) -> None:
    data = rows(30, random.Random(style))
    text = WRITERS[style](data)
    (tmp_path / "a.json").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    by_line = midepoch.from_files(tmp_path / "same.jsonl")
    for name in ("a.json", "a.jsonl.gz"):
        ds = midepoch.from_files(tmp_path / name)
        assert same(list(ds), data)
        assert len(ds.pipeline.source.offsets) > 5
        assert ds.schema == by_line.schema
        assert ds.pipeline.source.nullable == by_line.pipeline.source.nullable
        assert [row["id"] for row in midepoch.from_files(tmp_path / name, columns=["id"])] == list(range(30))


def test_rows_are_those_of_datasets(tmp_path: Path) -> None:
    data = [{"id": i, "text": f'a "{i}" [', "n": {"x": [i / 2]}, "maybe": None if i % 2 else i} for i in range(20)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data, indent=1))
    expected = datasets.load_dataset("json", data_files=str(path), split="train")
    ds = midepoch.from_files(path)
    assert list(ds) == list(expected) == data
    assert ds.features == expected.features


def test_arrays_and_lines_are_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}]')
    (tmp_path / "b.json").write_text('{"a": 2.5}\n{"b": "x"}\n')
    (tmp_path / "c.json").write_text(" [ ] ")
    assert list(midepoch.from_files(tmp_path)) == [
        {"a": 1.0, "b": None},
        {"a": 2.0, "b": None},
        {"a": 2.5, "b": None},
        {"a": None, "b": "x"},
    ]


def test_objects_without_columns_count(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{}, {"a": 1}, {}]')
    assert list(midepoch.from_files(tmp_path / "a.json")) == [{"a": None}, {"a": 1}, {"a": None}]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("write", [json.dumps, lambda data: "\n".join(map(json.dumps, data))], ids=["array", "lines"])
def test_lists_of_nothing_but_nulls_are_read(write: Callable[[list[Any]], str], on_error: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    data = [
        {"flat": [None] * (i % 4), "inner": {"deep": [[None] * i, []]}, "lists": [{"d": [None] * i}] * 2}
        for i in range(9)
    ]
    data[4] = dict.fromkeys(data[4])
    path.write_text(write(data))
    assert list(midepoch.from_files(path, on_error=on_error)) == data


@pytest.mark.parametrize(
    ("value", "layout", "on_error"),
    alternating([1, "a", True, 0.5, [None, 1], {"x": [None, 2]}], ["array", "lines"], ["raise", "skip"]),
)
def test_lists_that_begin_with_nulls_are_read(value: Any, layout: str, on_error: str, tmp_path: Path) -> None:
    """pyarrow loses nulls of lists before the first other value of a column."""
    write = json.dumps if layout == "array" else lambda data: "\n".join(map(json.dumps, data))
    path = tmp_path / "a.json"
    for lists in product([[None, None], [], None, [None, value], [None, None, value, None], [value]], repeat=2):
        data = [{"a": each, "b": {"c": [each, None]}} for each in lists]
        path.write_text(write(data))
        assert list(midepoch.from_files(path, on_error=on_error, force_reindex=True)) == data


@pytest.mark.usefixtures("small_blocks")
def test_resumes_exactly(tmp_path: Path) -> None:
    data = rows(40, random.Random(1))
    (tmp_path / "a.json").write_text(json.dumps(data, indent=2))
    ds = midepoch.from_files(tmp_path / "a.json", columns=["id", "half"]).shuffle(seed=3, window=3)
    assert sorted(row["id"] for row in ds) == list(range(40))
    assert_resumes_exactly(lambda: ds.loader(7), resume_with=[lambda: ds.loader(7, num_workers=2)], steps=[0, 2, 5, 6])


DAMAGED = [  # text, the message, and the ids that on_error="skip" reads
    ('[{"id": 0}, {"id": }, {"id": 2}]', "element 1 of the array .* cannot be read: Invalid value", [0, 2]),
    ('[{"id": 0}, {"id": 1, "id": 2}]', "element 1 .* cannot be read: .*specified twice", [0]),
    ('[{"id": 0}, {"id": 1} {"id": 2}]', "element 2 .* is not an object", [0, 1]),
    ('[{"id": 0},, {"id": 1}]', "element 1 .* is not an object", [0]),
    ('[{"id": 0}, {"id": 1}, ]', "element 2 .* is not an object", [0, 1]),
    ('[{"id": 0}, 7, {"id": 1}]', "element 1 .* is not an object", [0]),
    ('[{"id": 0}, [{"id": 1}]]', "element 1 .* is not an object", [0]),
    ('[{"id": 0}, {"id": 1}', "the array has no end: element 2 ", [0, 1]),
    ('[{"id": 0}, {"id": 1', "the array has no end: element 1 ", [0]),
    ('[{"id": 0}, {"id": "x}, {"id": 2}]', "the array has no end: element 1 |element 1 ", [0]),
    ('[{"id": 0}}, {"id": 1}]', "element 1 .* is not an object", [0]),
    ('[{"id": 0}] [{"id": 1}]', "text after the end of the array", [0]),
    ('[{"id": 0}]}', "text after the end of the array", [0]),
    ('["a", {"id": 1}]', "element 0 .* is not an object", None),
    ('[{"id": 0}, {"id": [}], 1}]', "element 1 ", [0]),
]


@pytest.mark.parametrize(("text", "message", "ids"), DAMAGED)
def test_damage_names_the_element(
    text: str, message: str, ids: list[int] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=rf"a\.json: .*{message}"):
        midepoch.from_files(path)
    if ids is None:
        with pytest.raises(midepoch.MidepochError):
            midepoch.from_files(path, on_error="skip")
        return
    with caplog.at_level(logging.WARNING, "midepoch"):
        assert [row["id"] for row in midepoch.from_files(path, on_error="skip")] == ids
    assert "a.json" in caplog.text


def test_elements_that_are_left_out_are_named_whenever_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ['{"id": }' if i in (2, 3, 7) else f'{{"id": {i}}}' for i in range(9)]
    (tmp_path / "a.json").write_text(f"[{', '.join(texts)}]")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "midepoch"):
            ds = midepoch.from_files(tmp_path / "a.json", on_error="skip")
        assert [row["id"] for row in ds] == [0, 1, 4, 5, 6, 8]
        assert "skipped 3 lines or elements that cannot be read: 2, 3, 7" in caplog.text


def test_text_that_is_not_utf8_names_the_element(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"a": "x"}, {"a": "\xff"}, {"a": "y"}]')
    with pytest.raises(FormatError, match="element 1 .* it is not UTF-8"):
        midepoch.from_files(tmp_path / "a.json")
    assert [row["a"] for row in midepoch.from_files(tmp_path / "a.json", on_error="skip")] == ["x", "y"]


def test_values_of_different_types_are_an_error_that_names_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": {"b": 1}}, {"a": {"b": "x"}}]')
    for mode in ("raise", "skip"):
        with pytest.raises(FormatError, match="column 'a/b' contains number in some rows and string in others"):
            midepoch.from_files(tmp_path / "a.json", on_error=mode)


def test_one_object_over_several_lines_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"a": 1}]}, indent=1))
    with pytest.raises(FormatError, match=r"JSON object over several lines.*json.dumps.*field=.data., split="):
        midepoch.from_files(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps({"data": [{"a": 1}]}))
    assert list(midepoch.from_files(tmp_path / "b.json")) == [{"data": [{"a": 1}]}]


def test_elements_are_found_from_any_cut(tmp_path: Path) -> None:
    """Whatever of the text has come so far, the elements found are complete and the first ones."""
    data = rows(6, random.Random(9))
    text = json.dumps(data)[1:].encode()
    for cut in range(len(text) + 1):
        found = elements(text[:cut], is_first=True)
        assert found.wrong is None
        values = [json.loads(text[a:b]) for a, b in zip(found.starts, found.stops, strict=True)]
        assert values == data[: len(values)]
        assert found.end == (len(text) - 1 if cut == len(text) else None)


def test_finding_elements_takes_no_call_for_each() -> None:
    data = json.dumps([{"id": i, "text": 'a "b"'} for i in range(10_000)])[1:].encode()
    assert len(elements(data, is_first=True).stops) == 10_000
    assert calls_of(lambda: elements(data, is_first=True)) < 200


def test_brackets_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"id": i, "list": [[i]]} for i in range(100)]))
    sizes: list[int] = []
    look = lines.bracket_depths
    monkeypatch.setattr(lines, "bracket_depths", lambda data: (sizes.append(len(data)), look(data))[1])
    assert len(midepoch.from_files(tmp_path / "a.json")) == 100
    assert len([size for size in sizes if size > 10]) == 1  # and once for what comes after the array


@pytest.mark.usefixtures("small_blocks")
def test_mutated_text_is_what_json_load_reads_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a crash nor a wrong row, and nothing that Python refuses is read."""
    draw, path = random.Random(5), tmp_path / "a.json"
    base = [{"a": i, "b": '"[{,\\' * (i % 3), "c": [{"d": "é"}] * (i % 2), "e": {"f": None}} for i in range(9)]
    read = refused = 0
    for _ in range(60):
        data = bytearray(json.dumps(base, indent=draw.choice([None, 1])).encode())
        at = draw.randrange(1, len(data))
        data[at : at + draw.randrange(3)] = draw.choice(
            [b"", b" ", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"1", b"\xff"]
        )
        path.write_bytes(data)
        try:
            expected = json.loads(bytes(data))
        except ValueError:
            expected = None
        try:
            found = list(midepoch.from_files(path))
        except FormatError:
            refused += 1
            with suppress(midepoch.MidepochError):  # of a file without any element
                list(midepoch.from_files(path, on_error="skip"))
        else:
            read += 1
            assert same(found, expected)
    assert read > 5
    assert refused > 20


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_values_nested_too_deeply_are_refused_and_skipped(
    kind: str, opening: str, closing: str, tmp_path: Path
) -> None:
    def row(depth: int) -> str:
        return '{"a": ' + opening * depth + "1" + closing * depth + "}"

    path = tmp_path / f"deep.{kind}"
    for depth in (101, 2_000, 50_000):  # pyarrow crashes at the last
        both = [row(3), row(depth)]
        path.write_text("\n".join(both) if kind == "jsonl" else f"[{', '.join(both)}]")
        with pytest.raises(FormatError, match=r"(line 2|element 1 of the array).* more than 100 brackets.*on_error="):
            midepoch.from_files(path)
        assert len(midepoch.from_files(path, on_error="skip")) == 1
    path.write_text(f"[{row(60)}]" if kind == "json" else row(60))
    assert json.dumps(next(iter(midepoch.from_files(path)))) == row(60)
