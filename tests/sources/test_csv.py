"""CSV: the rows, names and delimiters of pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow.csv as pcsv
import pytest

import midepoch
from midepoch.errors import FormatError
from midepoch.sources.formats import lines

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
    import pyarrow.csv as csv

    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    monkeypatch.setattr(lines, "_READ", 37)
    path = tmp_path / "a.csv"
    path.write_bytes(CSV[kind].encode())
    expected = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True)).to_pylist()
    ds = midepoch.from_files(path)
    assert list(ds) == expected
    assert len(expected) == 60
    assert len(ds.pipeline.source.layout.block_starts) > 3


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
