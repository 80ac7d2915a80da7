"""Plain text: the rows that Python and ``datasets`` read, wherever blocks end, and exact resumes."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import datasets
import pytest

import midepoch
from midepoch.errors import FormatError
from midepoch.sources.formats import lines
from midepoch.testing import assert_resumes_exactly

TEXTS = [
    b"",
    b"\n",
    b"one",
    b"one\n",
    b"\r\n\r\n",
    b"a\rb\r\n\nc\r",
    b"\xef\xbb\xbfmarked\nnext",
    "\x0b form \x0c feed \x85 next \u2028 separator \x1c\nend".encode(),
    b"  spaces \t\n \n\t\n",
    "é\n日本\n🙂".encode(),
    b'"quoted",\n"\n',
]


def python_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [line.removesuffix("\n") for line in file]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 9)
    monkeypatch.setattr(lines, "_READ", 4)


def test_rows_are_those_of_datasets(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i:02}.txt" for i in range(len(TEXTS))]
    for path, data in zip(paths, TEXTS, strict=True):
        path.write_bytes(data)
    expected = datasets.load_dataset("text", data_files=list(map(str, paths)), split="train")
    for ds in (midepoch.from_files(paths), midepoch.from_files(tmp_path), midepoch.from_files(f"{tmp_path}/*.txt")):
        assert list(ds) == list(expected)
        assert ds.features == expected.features


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("suffix", ["txt", "text.gz"])
def test_lines_are_those_of_python_wherever_a_block_ends(suffix: str, tmp_path: Path) -> None:
    draw = random.Random(3)
    several = 0
    for number in range(40):
        alphabet = draw.choice(["ab\r\n", "é\n", "a\r", "abcdefghijk\r\n", "\r\n"])
        data = "".join(draw.choices(alphabet, k=draw.randrange(1, 60))).encode()
        plain, path = tmp_path / f"{number}.plain", tmp_path / f"{number}.{suffix}"
        plain.write_bytes(data)
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        ds = midepoch.from_files(path)
        assert [row["text"] for row in ds] == python_lines(plain)
        several += len(ds.pipeline.source.offsets) > 3
    assert several > 10


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\xff\xfe two\n\nthree\xc3\nfour")
    with pytest.raises(FormatError, match=r'a\.txt: line 2 cannot be read: it is not UTF-8.*on_error="skip"'):
        midepoch.from_files(path)
    assert [row["text"] for row in midepoch.from_files(path, on_error="skip")] == ["one", "", "four"]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_broken_line_is_numbered_by_any_line_end(end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(end.join([b"one", b"", b"three"] * 30 + [b"\xff", b"last"]))  # more than one block
    with pytest.raises(FormatError, match=r"a\.txt: line 91 cannot be read"):
        midepoch.from_files(path)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(midepoch.DataNotFoundError, match=r"no rows in .*a\.txt"):
        midepoch.from_files(tmp_path / "a.txt")


@pytest.mark.usefixtures("small_blocks")
def test_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(23)))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("\n".join(f"line {i}" for i in range(23, 40)))
    ds = midepoch.from_files(tmp_path).shuffle(seed=3, window=3)
    assert sorted(int(row["text"][5:]) for row in ds) == list(range(40))
    assert_resumes_exactly(lambda: ds.loader(7), resume_with=[lambda: ds.loader(7, num_workers=2)], steps=[2, 6])


def test_tables_beside_text_are_the_data(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("about the data\n")
    (tmp_path / "a.csv").write_text("n\n1\n")
    assert list(midepoch.from_files(tmp_path)) == [{"n": 1}]
    assert list(midepoch.from_files(tmp_path, format="text")) == [{"text": "about the data"}]
