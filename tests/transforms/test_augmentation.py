"""Random augmentation after decode: the same tensors after a resume with other workers, others for another seed.

The transforms are real ones: torchvision.transforms.v2 and albumentations where they are installed, and torch's functions.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import midepoch
from midepoch.transforms.media.images import available

ROWS = 24
Function = Callable[..., dict[str, Any]]


@pytest.fixture
def images(tmp_path: Path) -> midepoch.Dataset:
    generator, files = np.random.default_rng(1), []
    for _ in range(ROWS):
        stream = io.BytesIO()
        Image.fromarray(generator.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(stream, "JPEG")
        files.append(stream.getvalue())
    pq.write_table(pa.table({"image": files}), tmp_path / "0.parquet", row_group_size=7)
    return midepoch.from_files(str(tmp_path / "0.parquet"))


def cropped(image: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    top, left = torch.randint(0, 16, (2,), generator=generator).tolist()
    image = image[:, top : top + 24, left : left + 24]
    return image.flip(2) if torch.rand((), generator=generator) < 0.5 else image


def with_torch(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": cropped(row["image"])}


def with_torch_generator(row: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return {"image": cropped(row["image"], generator)}


def with_torchvision() -> Function:
    if not available("torchvision"):
        pytest.skip("torchvision is not installed")
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)])
    return lambda row: {"image": transform(row["image"])}


def with_albumentations() -> Function:
    """Its transforms have generators of their own, which are seeded from that of the row."""
    if not available("albumentations"):
        pytest.skip("albumentations is not installed")
    import albumentations as a

    transform = a.Compose([a.RandomResizedCrop((24, 24)), a.HorizontalFlip(), a.ColorJitter()])

    def augment(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        transform.set_random_seed(int(generator.integers(2**31)))
        return {"image": transform(image=row["image"])["image"]}

    return augment


def augmented(images: midepoch.Dataset, library: str, seed: int = 1) -> midepoch.Dataset:
    ds = images.shuffle(seed=seed)
    if library == "albumentations":
        return ds.with_format("numpy").decode("image", layout="HWC").map(with_albumentations(), with_generator=True)
    if library == "torch generator":
        return ds.decode("image").map(with_torch_generator, with_generator="torch")
    return ds.decode("image").map(with_torch if library == "torch" else with_torchvision())


def tensors(loader: midepoch.Loader) -> Any:
    """The images of the rest of the epoch and of the next one."""
    return np.concatenate([np.asarray(batch["image"]) for _ in range(2) for batch in loader])


@pytest.mark.parametrize("library", ["torch", "torch generator", "torchvision", "albumentations"])
def test_a_resume_with_other_workers_gives_the_same_tensors(images: midepoch.Dataset, library: str) -> None:
    torch.manual_seed(0)
    ds = augmented(images, library)
    loader = ds.loader(4, num_workers=0)
    next(loader), next(loader)
    state = loader.state_dict()
    expected = tensors(loader)
    assert expected.shape[0] == 2 * ROWS - 8 and expected.dtype == np.uint8
    for workers in (0, 1, 3):
        again = augmented(images, library).loader(4, num_workers=workers)
        again.load_state_dict(state)
        np.testing.assert_array_equal(tensors(again), expected)


@pytest.mark.parametrize("library", ["torch", "torch generator", "torchvision", "albumentations"])
def test_epochs_and_seeds_differ(images: midepoch.Dataset, library: str) -> None:
    torch.manual_seed(0)

    def by_row(seed: int, epoch: int) -> Any:
        ds = augmented(images, library, seed)
        ds.set_epoch(epoch)
        found = [np.asarray(row["image"]) for row in ds]
        order = images.shuffle(seed=seed).map(lambda row, number: {"number": number}, with_indices=True)
        order.set_epoch(epoch)
        return {row["number"]: image for row, image in zip(order, found, strict=True)}

    first, again = by_row(1, 0), by_row(1, 0)
    assert all(np.array_equal(image, again[row]) for row, image in first.items())
    for other in (by_row(2, 0), by_row(1, 1)):
        assert sum(np.array_equal(image, other[row]) for row, image in first.items()) < ROWS / 4


def test_a_torch_generator_differs_for_each_row_and_function(images: midepoch.Dataset) -> None:
    def draw(row: dict[str, Any], generator: torch.Generator, name: str) -> dict[str, Any]:
        assert isinstance(generator, torch.Generator) and generator.device.type == "cpu"
        return {name: torch.rand((), generator=generator).item()}

    rows = list(
        images.shuffle(seed=1)
        .map(draw, with_generator="torch", fn_kwargs={"name": "a"})
        .map(draw, with_generator="torch", fn_kwargs={"name": "b"})
    )
    assert len({row[name] for row in rows for name in "ab"}) == 2 * ROWS


def test_a_batched_function_gets_a_list_of_torch_generators(images: midepoch.Dataset) -> None:
    def draw(batch: dict[str, Any], generators: list[torch.Generator]) -> dict[str, Any]:
        return {"drawn": [torch.rand((), generator=generator).item() for generator in generators]}

    def draw_one(row: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        return {"drawn": torch.rand((), generator=generator).item()}

    ds = images.shuffle(seed=1)
    batched = [row["drawn"] for row in ds.map(draw, batched=True, batch_size=5, with_generator="torch")]
    assert batched == [row["drawn"] for row in ds.map(draw_one, with_generator="torch")]
    assert len(list(ds.filter(lambda row, g: bool(torch.rand((), generator=g) < 2), with_generator="torch"))) == ROWS


def test_the_kind_of_generator_is_checked(images: midepoch.Dataset) -> None:
    with pytest.raises(ValueError, match="'numpy' or 'torch', got 'jax'"):
        images.map(with_torch_generator, with_generator="jax")
    kinds = []
    list(images.map(lambda row, g: kinds.append(type(g)), with_generator="numpy"))
    assert set(kinds) == {np.random.Generator}


def test_global_generators_are_left_alone_if_they_are_not_to_be_seeded(images: midepoch.Dataset) -> None:
    def draw(row: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": random.random() + np.random.rand() + torch.rand(()).item()}

    def drawn(**options: Any) -> list[float]:
        return [row["drawn"] for row in images.shuffle(seed=1).map(draw, **options)]

    torch.manual_seed(0)
    assert drawn() == drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = drawn(seed_globals=False)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [random.random() + np.random.rand() + torch.rand(()).item() for _ in range(ROWS)]
    assert first == expected != drawn(seed_globals=False)
    assert len(list(images.filter(lambda row: random.random() < 2, seed_globals=False))) == ROWS
    assert len(list(images.flat_map(lambda row: [{"n": random.random()}], seed_globals=False))) == ROWS
