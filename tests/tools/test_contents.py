"""Values of rows in words: media by their sizes, labels by their names."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from midepoch.cli.app import app
from midepoch.tools.contents import describe_media, feature_text, label_names

pillow = pytest.importorskip("PIL.Image")
soundfile = pytest.importorskip("soundfile")

LABEL = {"_type": "ClassLabel", "names": ["cat", "dog", "a fish"]}


def image(width: int, height: int, mode: str, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    pillow.effect_noise((width, height), 50).convert(mode).save(file, format)
    return file.getvalue()


def sound(samples: int, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((samples, 2), np.float32), 8000, format=format)
    return file.getvalue()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("feature", [None, {"_type": "Image"}])
def test_images(format: str, feature: Any) -> None:
    data = image(30, 20, "L" if format == "GIF" else "RGB", format)
    found = describe_media({"bytes": data, "path": None}, feature)
    assert found is not None and found.kind == "image"
    assert (found.details["width"], found.details["height"], found.details["format"]) == (30, 20, format)
    assert found.text.startswith(f"{format}, 30 × 20, ")
    assert describe_media(data, feature) == found


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG"])
def test_audio(format: str) -> None:
    found = describe_media(sound(12_000, format))
    assert found is not None and found.kind == "audio"
    assert found.details == {"seconds": 1.5, "sampling_rate": 8000, "channels": 2}
    assert found.text == "1.50 s, 8,000 Hz, 2 channels"


def test_video(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 64, 48
        for _ in range(5):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = describe_media((tmp_path / "a.mp4").read_bytes())
    assert found is not None and found.kind == "video"
    assert found.details == {"frames": 5, "width": 64, "height": 48} and found.text == "5 frames, 64 × 48"
    assert describe_media(str(tmp_path / "a.mp4"), {"_type": "Video"}) == found


def test_what_is_damaged_or_no_media() -> None:
    cut = image(30, 20, "RGB")[:-200]
    found = describe_media(cut)
    assert found is not None and found.text.startswith("cannot be decoded: ") and found.details["problem"]
    found = describe_media({"bytes": None, "path": "/nowhere/a.png"}, {"_type": "Image"})
    assert found is not None and "No such file" in found.text
    for value in (b"no image", b"", "text", 3, None, {"bytes": None, "path": None}, {"a": cut}):
        assert describe_media(value) is None, value


def test_labels_and_features() -> None:
    assert label_names(1, LABEL) == "dog"
    assert label_names([0, 2], [LABEL]) == label_names([0, 2], {"_type": "List", "feature": LABEL}) == ["cat", "a fish"]
    for value, feature in ((-1, LABEL), (3, LABEL), (None, LABEL), (1, {"_type": "Value"}), (1, None), ("dog", LABEL)):
        assert label_names(value, feature) is None
    assert feature_text([LABEL]) == "List of ClassLabel: cat, dog, a fish"
    assert feature_text({"_type": "Audio", "sampling_rate": 16000}) == "Audio, 16,000 Hz"
    assert feature_text({"_type": "Value", "dtype": "int64"}) is feature_text(None) is None
    many = {"_type": "ClassLabel", "names": [f"n{number}" for number in range(1000)]}
    assert feature_text(many) == "ClassLabel: n0, n1, n2, n3, n4, n5, n6, n7, … (1,000 names)"


def test_peek_and_info_of_a_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=LABEL["names"])})
    files = [{"bytes": image(30 + number, 20, "RGB"), "path": None} for number in range(3)]
    table = pa.Table.from_pydict({"picture": files, "label": [2, 0, 1]}, schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "a.parquet")

    def call(*arguments: str) -> str:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = call("peek", str(tmp_path), "-n", "2")
    for text in ("PNG, 30 × 20, RGB", "PNG, 31 × 20, RGB", "2 (a fish)", "0 (cat)", "Image", "ClassLabel: cat, dog"):
        assert text in shown
    rows = json.loads(call("peek", str(tmp_path), "--json"))
    assert [row["labels"] for row in rows] == [{"label": "a fish"}, {"label": "cat"}, {"label": "dog"}]
    expected = {"kind": "image", "format": "PNG", "width": 32, "height": 20, "mode": "RGB"}
    assert rows[2]["media"]["picture"] == expected
    assert "ClassLabel: cat, dog, a fish" in call("info", str(tmp_path))
