"""Folders of texts, images and sounds: from_files names the call that reads them, and that call does."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import midepoch
from midepoch.errors import DataNotFoundError, FormatError


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("a.txt", r"load_dataset\('text', data_files=…, split='train'\)"),
        ("a.JPG", r"load_dataset\('imagefolder', data_dir=…, split='train'\)"),
        ("a.flac", r"load_dataset\('audiofolder', data_dir=…, split='train'\)"),
    ],
)
def test_the_error_names_the_call(name: str, call: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("something")
    with pytest.raises(DataNotFoundError, match=call):
        midepoch.from_files(tmp_path)
    with pytest.raises(FormatError, match=call):
        midepoch.from_files(tmp_path / name)


def test_no_call_is_named_for_files_of_other_or_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("something")
    for files in (["a.xyz"], ["a.xyz", "b.txt", "c.png"]):
        for name in files:
            (tmp_path / name).write_text("something")
        with pytest.raises(DataNotFoundError) as caught:
            midepoch.from_files(tmp_path)
        assert "load_dataset" not in str(caught.value)


def test_the_calls_read_such_files(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8 + number, 9)).save(tmp_path / "images" / label / f"{number}.png")
    images = midepoch.load_dataset("imagefolder", data_dir=str(tmp_path / "images"), split="train")
    batch = next(images.decode("image", size=4).loader(6))
    assert batch["image"].shape == (6, 3, 4, 4)
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    lines = midepoch.load_dataset("text", data_files=str(tmp_path / "a.txt"), split="train")
    assert list(lines) == [{"text": "one"}, {"text": "two"}]
