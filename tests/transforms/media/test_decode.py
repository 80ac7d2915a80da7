"""Dataset.decode: files in columns of every type, damaged ones, formats, functions after it, and its identity."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image

import midepoch
from data import dataset_of
from forks import Forks
from midepoch.errors import CheckpointMismatchError, ColumnError, MapError, MidepochError
from midepoch.transforms.media import images

ROWS = 12


def pixels(number: int) -> Any:
    y, x = np.mgrid[: 30 + number, :40]
    return np.stack([x * 6, y * 4, np.full_like(x, number * 20)], -1).astype(np.uint8)


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(number)).save(stream, "PNG")
    return stream.getvalue()


FILES = [png(number) for number in range(ROWS)]


def opened(path: Path, column: Any, **options: Any) -> midepoch.Dataset:
    table = pa.table({"image": column, "label": list(range(ROWS))})
    pq.write_table(table, path / "images.parquet", row_group_size=5)
    return midepoch.from_files(str(path / "images.parquet"), **options)


def structs(**fields: Any) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array(values) for values in fields.values()], names=list(fields))


def in_files(folder: Path) -> list[str]:
    for number, data in enumerate(FILES):
        (folder / f"{number}.png").write_bytes(data)
    return [str(folder / f"{number}.png") for number in range(ROWS)]


COLUMNS: dict[str, Callable[[Path], Any]] = {
    "binary": lambda folder: pa.array(FILES),
    "large binary": lambda folder: pa.array(FILES, pa.large_binary()),
    "paths": in_files,
    "bytes and paths": lambda folder: structs(bytes=FILES, path=["nowhere.png"] * ROWS),
    "bytes or paths": lambda folder: structs(
        bytes=[None if number % 2 else data for number, data in enumerate(FILES)], path=in_files(folder)
    ),
    "structs of paths": lambda folder: structs(path=in_files(folder)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_files_in_columns_of_every_type(tmp_path: Path, kind: str) -> None:
    ds = opened(tmp_path, COLUMNS[kind](tmp_path)).decode("image")
    assert ds.column_names == ["image", "label"] and len(ds) == ROWS
    for number, row in enumerate(ds):
        assert row["label"] == number and row["image"].dtype == torch.uint8
        np.testing.assert_array_equal(row["image"].permute(1, 2, 0).numpy(), pixels(number))


def test_paths_are_relative_to_the_root(tmp_path: Path) -> None:
    ds = opened(tmp_path, [Path(path).name for path in in_files(tmp_path)])
    np.testing.assert_array_equal(ds.decode("image", layout="HWC", root=tmp_path)[3]["image"].numpy(), pixels(3))


def test_what_a_function_returned_is_decoded(tmp_path: Path) -> None:
    folder = in_files(tmp_path)
    ds = opened(tmp_path, pa.array(FILES))
    for made in (
        lambda row: {"image": row["image"]},
        lambda row: {"image": {"bytes": row["image"], "path": None}},
        lambda row: {"image": folder[row["label"]]},
        lambda row: {"image": Path(folder[row["label"]])},
    ):
        np.testing.assert_array_equal(ds.map(made).decode("image", layout="HWC")[5]["image"].numpy(), pixels(5))
    with pytest.raises(MapError, match="'image' has a value of type int, expected bytes or a path"):
        ds.map(lambda row: {"image": 3}).decode("image")[0]


HUGGING_FACE = """
import io, sys
import datasets, numpy as np, pyarrow as pa, soundfile
from PIL import Image
features = datasets.Features({"picture": datasets.Image(), "sound": datasets.Audio(), "n": datasets.Value("int64")})
sound = io.BytesIO()
soundfile.write(sound, np.ones((100, 2), np.float32) / 2, 8000, format="WAV", subtype="FLOAT")
pictures = [datasets.Image().encode_example(Image.new("RGB", (6, 4), (i, 2 * i, 0))) for i in range(6)]
rows = {"picture": pictures, "sound": [{"bytes": sound.getvalue(), "path": None}] * 6, "n": list(range(6))}
datasets.Dataset(pa.table(rows, schema=features.arrow_schema)).save_to_disk(sys.argv[1])
"""
WITHOUT_DATASETS = """
import sys
import midepoch
ds = midepoch.load_from_disk(sys.argv[1], on_error="skip").rename_columns({"picture": "image"}).decode("image", size=4).decode("sound")
batch = next(ds.loader(4, last_batch="drop"))
assert batch["image"].shape == (4, 3, 4, 4) and batch["image"][3, :, 0, 0].tolist() == [3, 6, 0], batch
assert batch["sound"].shape == (4, 2, 100) and batch["sound"].unique().tolist() == [0.5], batch
assert "datasets" not in sys.modules
print("done")
"""


def test_features_of_hugging_face_are_decoded_without_datasets(
    tmp_path: Path, framework_forks: Forks, torch_forks: Forks
) -> None:
    for forks, script in ((framework_forks, HUGGING_FACE), (torch_forks, WITHOUT_DATASETS)):
        [done] = forks.run(["-c", script, str(tmp_path / "saved")])
        assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_batches_of_one_size_are_one_tensor_with_any_number_of_workers(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES)).shuffle(seed=1)
    for workers in (0, 2):
        batches = list(ds.decode("image", size=(16, 24)).loader(4, workers))
        assert [tuple(batch["image"].shape) for batch in batches] == [(4, 3, 16, 24)] * 3
        assert all(batch["image"].dtype == torch.uint8 and batch["image"].is_contiguous() for batch in batches)
        ragged = [image for batch in ds.decode("image").loader(4, workers) for image in batch["image"]]
        labels = [label for batch in batches for label in batch["label"].tolist()]
        assert [tuple(image.shape) for image in ragged] == [(3, 30 + label, 40) for label in labels]


def test_a_function_gets_tensors_or_arrays_and_other_values_unchanged(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES))
    found: list[Any] = []

    def look(row: dict[str, Any]) -> dict[str, Any]:
        found.append((type(row["image"]), tuple(row["image"].shape), type(row["label"])))
        return {}

    for size in (None, 30):
        for form, image, label in (
            (None, torch.Tensor, int),
            ("torch", torch.Tensor, torch.Tensor),
            ("numpy", np.ndarray, np.int64),
            ("python", np.ndarray, int),
        ):
            found.clear()
            list(ds.take(2).with_format(form).decode("image", size=size).map(look))
            shapes = [(3, 30, size or 40), (3, 30 if size else 31, size or 40)]
            assert found[-2:] == [(image, shape, label) for shape in shapes]


def test_a_batched_function_gets_one_tensor(tmp_path: Path) -> None:
    def bright(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "shape": [list(batch["image"].shape)] * len(batch["label"]),
            "kind": [type(batch["image"]).__name__] * len(batch["label"]),
        }

    ds = opened(tmp_path, pa.array(FILES))
    row = (
        ds.with_format("torch").decode("image", size=8).map(bright, batched=True, batch_size=4).with_format("python")[0]
    )
    assert row["shape"] == [4, 3, 8, 8] and row["kind"] == "Tensor"
    assert (
        ds.with_format("numpy")
        .decode("image", size=8)
        .map(bright, batched=True, batch_size=4)
        .with_format("python")[0]["kind"]
        == "ndarray"
    )


def test_jpegs_as_read_from_files_are_decoded_by_the_fast_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = images.fast_decoder()
    assert fast is not None
    headers = []

    def counting(data: Any, mode: str, header: images.Header, scale: int) -> Any:
        headers.append(header)
        return fast(data, mode, header, scale)

    monkeypatch.setattr(images, "fast_decoder", lambda: counting)
    stream = io.BytesIO()
    Image.fromarray(pixels(3)).save(stream, "JPEG")
    ds = opened(tmp_path, pa.array([stream.getvalue()] * ROWS))
    arrow = dataset_of(tmp_path / "arrow", ds.with_format("arrow")[:])
    for each in (ds, arrow, ds.map(lambda row: {})):
        headers.clear()
        assert len(list(each.decode("image"))) == ROWS
        assert headers == [images.Header(40, 33, 3, 8, 1)] * ROWS


def test_formats_after_decode(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES)).decode("image", size=8)
    wanted = next(ds.loader(4))["image"].numpy()
    np.testing.assert_array_equal(next(ds.with_format("numpy").loader(4))["image"], wanted)
    table = next(ds.with_format("arrow").loader(4))
    np.testing.assert_array_equal(np.array(table["image"].to_pylist()), wanted)


@pytest.mark.parametrize("size", [None, 8])
def test_a_damaged_file_names_its_row_and_file_or_is_skipped(tmp_path: Path, size: int | None) -> None:
    files = [data[:60] if number in (3, 7) else data for number, data in enumerate(FILES)]
    column = structs(bytes=files, path=[f"picture-{number}.png" for number in range(ROWS)])
    ds = opened(tmp_path, column)
    with pytest.raises(
        MapError,
        match=r"decode\('image'\) of picture-3.png failed on row 3 of the dataset \(row 3 of .*images.parquet\)",
    ):
        list(ds.decode("image", size=size))
    good = [number for number in range(ROWS) if number not in (3, 7)]
    skipping = ds.decode("image", size=size, on_error="skip")
    assert [row["label"] for row in skipping] == good
    loader = skipping.loader(4, num_workers=2)
    assert [label for batch in loader for label in batch["label"].tolist()] == good
    same = midepoch.from_files(str(tmp_path / "images.parquet"), on_error="skip")
    assert [row["label"] for row in same.decode("image", size=size)] == good
    assert not list(ds.slice(3, 4).decode("image", size=size, on_error="skip"))


def test_a_missing_file_and_a_null_are_damage(tmp_path: Path) -> None:
    paths: list[str | None] = [*in_files(tmp_path)]
    paths[2], paths[4] = str(tmp_path / "gone.png"), None
    ds = opened(tmp_path, paths)
    with pytest.raises(MapError, match="row 2 of .*gone.png"):
        list(ds.decode("image"))
    with pytest.raises(MapError, match="row 4 of .*the value is null"):
        list(ds.slice(3, 6).decode("image"))
    assert [row["label"] for row in ds.decode("image", on_error="skip")] == [0, 1, 3, *range(5, ROWS)]


def test_options_are_checked_when_the_step_is_added(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES))
    for options, message in (
        ({"size": 0}, "size"),
        ({"size": (1, 2, 3)}, "height, width"),
        ({"size": (8, 9), "fit": "shorter"}, "one number"),
        ({"fit": "squeeze"}, "fit"),
        ({"mode": "CMYK"}, "mode"),
        ({"layout": "WHC"}, "layout"),
        ({"kind": "text"}, "kind"),
        ({"frames": 3}, "frames cannot be given for image"),
        ({"kind": "audio", "size": 3}, "size cannot be given for audio"),
        ({"kind": "audio", "channels": 5}, "channels"),
        ({"on_error": "ignore"}, "on_error"),
    ):
        with pytest.raises(ValueError, match=message):
            ds.decode("image", **options)  # type: ignore[arg-type]
    with pytest.raises(ColumnError, match="no column 'picture'"):
        ds.decode("picture")
    with pytest.raises(ColumnError, match="'label' is int64"):
        list(ds.decode("label"))


def test_a_state_of_another_size_is_refused(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES)).shuffle(seed=1)
    loader = ds.decode("image", size=8).loader(4)
    next(loader)
    state = loader.state_dict()
    for other in (
        {"size": 9},
        {"size": 8, "mode": "L"},
        {"size": 8, "fit": "stretch"},
        {"size": 8, "shrink": False},
        {},
    ):
        with pytest.raises(CheckpointMismatchError, match=r"decode\[image image RGB CHW 8x8 crop\]"):
            ds.decode("image", **other).loader(4).load_state_dict(state)  # type: ignore[arg-type]
    ds.decode("image", size=8).loader(4).load_state_dict(state)


def test_parts_of_a_mix_are_decoded_in_the_workers(tmp_path: Path) -> None:
    ds = opened(tmp_path, pa.array(FILES))
    mixed = midepoch.mix([ds.shuffle(seed=1), ds.shuffle(seed=2)], seed=3).decode("image", size=8)
    expected = [batch["image"] for batch, _ in zip(mixed.loader(4), range(5), strict=False)]
    found = [batch["image"] for batch, _ in zip(mixed.loader(4, num_workers=2), range(5), strict=False)]
    assert all(map(torch.equal, expected, found)) and len(found) == 5


def test_audio_and_video_columns(tmp_path: Path) -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.ones((80, 2), np.float32) / 4, 8000, format="WAV", subtype="FLOAT")
    ds = opened(tmp_path, pa.array([stream.getvalue()] * ROWS)).decode("image", "audio", channels=1)
    batch = next(ds.loader(4))
    assert batch["image"].shape == (4, 1, 80) and batch["image"].dtype == torch.float32
    assert "decode(image)" in repr(ds)


def test_a_missing_package_is_an_error_when_the_step_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = opened(tmp_path, pa.array(FILES))
    monkeypatch.setattr("midepoch.transforms.media.images.available", lambda name: False)
    with pytest.raises(MidepochError, match=r"pip install midepoch\[media\]"):
        ds.decode("image", on_error="skip")


def test_without_torch_results_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.dataset.steps.installed", lambda name: False)
    assert isinstance(opened(tmp_path, pa.array(FILES)).decode("image")[0]["image"], np.ndarray)
