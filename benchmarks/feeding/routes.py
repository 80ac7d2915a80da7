"""The loaders of the three loops: midepoch, and torch's DataLoader with the same work on every row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import midepoch
from benchmarks.feeding.files import Files
from benchmarks.feeding.work import EOS, WEIGHTS, Crop, Scale, Tokenizer, crop, is_long

LOOPS = ("tokens", "text", "images")
SEED = 1


def accepts(argument: str) -> bool:
    """Return True if ``Dataset.loader`` of this midepoch has the argument."""
    return argument in inspect.signature(midepoch.Dataset.loader).parameters


def batch_size(loop: str, scale: Scale) -> int:
    return scale.image_batch if loop == "images" else scale.sequences


def dataset(loop: str, files: Files, scale: Scale, tokenizers: Sequence[Any] = ()) -> midepoch.Dataset:
    """The dataset of a loop in midepoch. ``tokenizers``: one for each source of text."""
    if loop == "text":
        tokenizers = tokenizers or [Tokenizer(scale.vocabulary)] * 2
        sources = [
            midepoch.from_files(paths, index_dir=files.index)
            .shuffle(seed=SEED)
            .filter(is_long, input_columns="text")
            .tokenize(tokenizer)
            for paths, tokenizer in zip((files.web, files.code), tokenizers, strict=True)
        ]
        return midepoch.mix(sources, weights=WEIGHTS, seed=SEED, stop="all").pack(scale.length, eos=EOS)
    ds = midepoch.from_files(files.tokens if loop == "tokens" else files.images, index_dir=files.index)
    if loop == "tokens":
        return ds.shuffle(seed=SEED)
    function = Crop(scale.crop)
    return ds.shuffle(seed=SEED).map(function, input_columns="jpeg", remove_columns="jpeg", with_generator=True)


def ours(loop: str, files: Files, scale: Scale, workers: int, **options: Any) -> Any:
    """The loader of a loop in midepoch."""
    ds = dataset(loop, files, scale)
    return ds.loader(
        batch_size(loop, scale),
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
        **options,
    )


def torchs(loop: str, files: Files, scale: Scale, workers: int, **options: Any) -> Any:
    """The loader of a loop in torch, with the same work. Text is an IterableDataset: its rows have no numbers."""
    rows: Any
    if loop == "text":
        rows = PackedText(files, scale)
    else:
        rows = TokenRows(files.tokens) if loop == "tokens" else Images(files.images, scale.crop)
    return DataLoader(
        rows,
        batch_size(loop, scale),
        shuffle=None if loop == "text" else True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
        **options,
    )


def column(paths: tuple[str, ...], name: str) -> pa.ChunkedArray:
    """A column of mapped Arrow files."""
    tables = [pa.ipc.open_stream(pa.memory_map(path)).read_all() for path in paths]
    return pa.concat_tables(tables)[name]


@dataclass(eq=False)
class TokenRows(Dataset[Any]):
    paths: tuple[str, ...]

    @cached_property
    def rows(self) -> pa.ChunkedArray:
        return column(self.paths, "input_ids")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index].values.to_numpy().copy()}  # torch warns of read-only arrays


@dataclass(eq=False)
class Images(Dataset[Any]):
    paths: tuple[str, ...]
    size: int

    @cached_property
    def rows(self) -> tuple[pa.ChunkedArray, Any]:
        return column(self.paths, "jpeg"), column(self.paths, "label").to_numpy()

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        jpegs, labels = self.rows
        generator = np.random.default_rng((SEED, index))
        return {"image": crop(jpegs[index].as_py(), generator, self.size), "label": labels[index]}


class PackedText(IterableDataset[Any]):
    """Filter, tokenize, mix and pack. Every worker reads a part of the documents and packs sequences of its own."""

    def __init__(self, files: Files, scale: Scale) -> None:
        self._paths, self._length = (files.web, files.code), scale.length
        self._tokenizer = Tokenizer(scale.vocabulary)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        sources = [self._documents(column(paths, "text"), part, parts) for paths in self._paths]
        rng = np.random.default_rng((SEED, part))
        tokens = list[int]()
        positions, segments, documents = list[Any](), list[Any](), 0
        while True:
            document = next(sources[int(rng.random() >= WEIGHTS[0])])
            documents += 1
            tokens += document
            positions.append(np.arange(len(document)))
            segments.append(np.full(len(document), documents))
            while len(tokens) >= self._length:
                sequence, tokens = tokens[: self._length], tokens[self._length :]
                position, segment = np.concatenate(positions), np.concatenate(segments)
                positions, segments = [position[self._length :]], [segment[self._length :]]
                yield {
                    "input_ids": np.array(sequence, dtype=np.int32),
                    "position_ids": position[: self._length].astype(np.int32),
                    "segment_ids": (segment[: self._length] - segment[0] + 1).astype(np.int32),
                }

    def _documents(self, texts: pa.ChunkedArray, part: int, parts: int) -> Iterator[list[int]]:
        for epoch in count():
            order = np.random.default_rng((SEED, epoch)).permutation(len(texts))[part::parts]
            for start in range(0, len(order), 1_000):
                kept = [text for text in texts.take(order[start : start + 1_000]).to_pylist() if is_long(text)]
                for ids in self._tokenizer(kept)["input_ids"]:
                    yield [*ids, EOS]
