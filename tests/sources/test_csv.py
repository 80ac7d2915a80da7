"""CSV: the rows, names and delimiters of pyarrow."""

from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any

import pyarrow.csv as pcsv
import pytest

import midepoch
from midepoch.errors import CheckpointMismatchError, DataNotFoundError, FormatError
from midepoch.sources.formats import lines
from midepoch.testing import assert_resumes_exactly

CSV = {
    "stray quote": 'id,name,text\n0,5" pipe,plain\n'
    + "".join(f'{i},n,"one of {i}\ntwo, of {i}"\n' for i in range(1, 60)),
    "escaped": "id,name,text\n" + "".join(f'{i},"a ""quoted""\n\n"",b",x\n' for i in range(60)),
    "blank first": "\n\nid,name,text\n" + "".join(f"{i},a,b\n" for i in range(60)),
    "windows": "id,name,text\r\n" + "".join(f'{i},a,"b\r\nc"\r\n' for i in range(60)),
    "no last newline": "\ufeffid,name,text\n" + "\n".join(f"{i},a,b" for i in range(60)),
}


@pytest.mark.parametrize("kind", list(CSV))
def test_rows_are_those_of_pyarrow(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    monkeypatch.setattr(lines, "_READ", 37)
    path = tmp_path / "a.csv"
    path.write_bytes(CSV[kind].encode())
    expected = pcsv.read_csv(path, parse_options=pcsv.ParseOptions(newlines_in_values=True)).to_pylist()
    ds = midepoch.from_files(path)
    assert list(ds) == expected
    assert len(expected) == 60
    assert len(ds.pipeline.source.layout.block_starts) > 3


@pytest.mark.parametrize(("header", "delimiter"), [("a;b;c", ";"), ("a\tb", "\t"), ("a|b", "|")])
def test_a_header_with_another_delimiter_is_refused(header: str, delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n{header}\n")
    with pytest.raises(FormatError, match=re.escape(f"only column would be {header!r}. Pass delimiter={delimiter!r}")):
        midepoch.from_files(path)
    assert midepoch.from_files(path, delimiter=delimiter).column_names == header.split(delimiter)
    assert midepoch.from_files(path, delimiter=",").column_names == [header]


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"1,hello\n2,world\n", "its first row, '1', 'hello', is used as names"),
        ("a,b\ncaf\xe9,1\n".encode("latin-1"), "column 'a' is not UTF-8 text"),
    ],
    ids=["no header", "latin-1"],
)
def test_what_is_probably_not_meant_is_logged(
    contents: bytes, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_bytes(contents)
    assert len(midepoch.from_files(tmp_path / "a.csv")) == 1
    assert says in caplog.text


def test_names_and_delimiters(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    with pytest.raises(FormatError, match="several columns are named 'a'"):
        midepoch.from_files(tmp_path / "twice.csv")
    folder = tmp_path / "my.tsv.backup"
    folder.mkdir()
    (folder / "x.csv").write_text("a,b\n1,2\n")
    (folder / "y.tsv").write_text("a\tb\n1\t2\n")
    for name in ("x.csv", "y.tsv"):
        assert list(midepoch.from_files(folder / name)) == [{"a": 1, "b": 2}]
    (tmp_path / "mac.csv").write_bytes(b"a,b\r1,2\r3,4\r")
    with pytest.raises(FormatError, match="carriage return"):
        midepoch.from_files(tmp_path / "mac.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.tsv", "a\tb\n\t\n\t\n"),
        ("b.csv", "a,b\n , \n"),
        ("b.csv", "a\n \n  \n"),
        ("b.csv", "a,b\n1,2\n\n\n"),
        ("b.csv", "a\n1\n \n"),
    ],
)
def test_rows_of_nothing_but_blanks(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    delimiter = "\t" if name.endswith("tsv") else ","
    expected = pcsv.read_csv(tmp_path / name, parse_options=pcsv.ParseOptions(delimiter=delimiter)).num_rows
    assert expected and len(midepoch.from_files(tmp_path / name)) == expected


DELIMITERS = [";", "|", "\t", " ", ":", "\x01"]
# Each delimiter, and each name, with two or more of the others: a name says how a file is read, a delimiter how a line is.
GIVEN = [
    pytest.param(name, delimiter, marks=() if (first + second) % 3 == 2 else pytest.mark.slow)
    for first, name in enumerate(["a.csv", "a.tsv", "a.csv.gz", "a.txt", "a.dat"])
    for second, delimiter in enumerate(DELIMITERS)
]


@pytest.mark.parametrize(("name", "delimiter"), GIVEN)
def test_a_delimiter_that_is_given(name: str, delimiter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 60)
    monkeypatch.setattr(lines, "_READ", 37)
    rows = [{"a": i, "b": f"x,{i}{delimiter}\ny", "c": i / 2} for i in range(40)]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["a", "b", "c"], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    def loader(workers: int = 0) -> Any:
        ds = midepoch.from_files(tmp_path / name, delimiter=delimiter).with_format("python")
        return ds.shuffle(seed=1).loader(7, num_workers=workers)

    ds = midepoch.from_files(tmp_path / name, delimiter=delimiter)
    assert list(ds) == rows
    assert list(midepoch.from_files(tmp_path / name, delimiter=delimiter, filters=[("a", ">", 37)])) == rows[38:]
    assert_resumes_exactly(loader, epochs=1, steps=[3])


def test_other_delimiters_are_other_data(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b,c\n1;2,3\n")
    found = [midepoch.from_files(tmp_path / "a.csv", delimiter=each) for each in (None, ",", ";", None, ";")]
    commas, semicolons = {"a;b": "1;2", "c": 3}, {"a": 1, "b,c": "2,3"}
    assert [ds[0] for ds in found] == [commas, commas, semicolons, commas, semicolons]
    first, same, other, *_ = (ds.pipeline.source.fingerprint for ds in found)
    assert first == same != other
    loader = found[0].shuffle(seed=1).loader(1)
    next(iter(loader))
    with pytest.raises(CheckpointMismatchError, match="data differs"):
        found[2].shuffle(seed=1).loader(1).load_state_dict(loader.state_dict())


def test_a_delimiter_counts_and_not_the_name_that_implies_it(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv"):
        (tmp_path / name).write_text("a\tb,c\n1\t2,3\n")
    files = [("a.csv", None), ("a.tsv", ","), ("a.tsv", None), ("a.csv", "\t")]
    found = [midepoch.from_files(tmp_path / name, delimiter=each) for name, each in files]
    commas, tabs = {"a\tb": "1\t2", "c": 3}, {"a": 1, "b,c": "2,3"}
    assert [ds[0] for ds in found] == [commas, commas, tabs, tabs]
    first, renamed, other, same = (ds.pipeline.source.fingerprint for ds in found)
    assert first == renamed != other == same


@pytest.mark.parametrize("delimiter", ["", ";;", "é", '"', "\n", "\r", "\0", 59])
def test_a_delimiter_is_one_character(delimiter: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="delimiter must be one ASCII character, and no quote or line end, got"):
        midepoch.from_files(tmp_path / "a.csv", delimiter=delimiter)


def test_a_delimiter_is_for_csv_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"delimiter is for CSV files, but .*a\.jsonl is not one"):
        midepoch.from_files(tmp_path / "a.jsonl", delimiter=";")
    with pytest.raises(ValueError, match="delimiter is for CSV files, but format is 'jsonl'"):
        midepoch.from_files(tmp_path / "a.jsonl", format="json", delimiter=";")
    with pytest.raises(DataNotFoundError, match=r"no csv files .* it contains only \.jsonl"):
        midepoch.from_files(tmp_path, delimiter=";")
    with pytest.raises(TypeError, match="Did you mean delimiter="):
        midepoch.from_files(tmp_path, sep=";")  # type: ignore[call-arg]


def test_datasets_takes_a_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1;2\n")
    ds = midepoch.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train", delimiter=";")
    assert list(ds) == [{"a": 1, "b": 2}]
