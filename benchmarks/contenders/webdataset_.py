"""WebDataset: tar shards, read in order, shuffled by shard and by a buffer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

from benchmarks.contenders.common import BATCH, BUFFER, cut, package_version, walk, walk_tensors
from benchmarks.data import TOKENS_PER_ROW, Data

NAME = "WebDataset"


def version() -> str:
    return package_version("webdataset")


def prepare(data: Data, folder: Path) -> None:
    """The id is the key of the sample; the text is UTF-8, the tokens are raw int32."""
    (folder / "text").mkdir()
    (folder / "tokens").mkdir()
    texts = (
        (f"{row['id']:09d}.text", row["text"].encode()) for batch in data.text.batches() for row in batch.to_pylist()
    )
    _write(folder / "text", texts, rows_per_shard=_shard_size(data.text.rows))
    tokens = (
        (f"{i:09d}.bin", values.tobytes())
        for b in data.tokens.batches()
        for i, values in zip(
            b.column("id").to_pylist(),
            b.column("tokens").flatten().to_numpy().reshape(-1, TOKENS_PER_ROW),
            strict=True,
        )
    )
    _write(folder / "tokens", tokens, rows_per_shard=_shard_size(data.tokens.rows))


def _shard_size(rows: int) -> int:
    """10 to 40 MB a shard, and enough shards for two workers in a small run."""
    return min(10_000, max(1, rows // 8))


def _write(folder: Path, members: Iterator[tuple[str, bytes]], *, rows_per_shard: int) -> None:
    """Plain USTAR members: they read about twice as fast as what `TarWriter` writes, in 2/3 of the bytes."""
    tar: tarfile.TarFile | None = None
    for number, (name, content) in enumerate(members):
        if number % rows_per_shard == 0:
            if tar is not None:
                tar.close()
            path = folder / f"{number // rows_per_shard:05d}.tar"
            tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed when the next one opens
        assert tar is not None
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    if tar is not None:
        tar.close()


def _open(folder: Path, name: str, *, shuffle: bool, **options: Any) -> wds.WebDataset:
    shards = sorted(str(path) for path in (folder / name).glob("*.tar"))
    order = {"shardshuffle": len(shards), "seed": 1} if shuffle else {"shardshuffle": False}
    dataset = wds.WebDataset(shards, **order, **options)
    return dataset.shuffle(BUFFER) if shuffle else dataset


def _plain(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_open(folder, "text", shuffle=shuffle).decode())


def as_text(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(sample["__key__"]), "text": sample["text"].decode()}


def _mapped(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    """One function per row instead of the chain of decoders."""
    return walk(_open(folder, "text", shuffle=shuffle).map(as_text))


def tokens_of(sample: dict[str, Any]) -> Any:
    return np.frombuffer(sample["bin"], np.int32)


def raw(sample: dict[str, Any]) -> Any:
    return sample["bin"]


def join(records: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray().join(records), np.int32).reshape(-1, TOKENS_PER_ROW))


def stack(rows: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


def _tokens(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    dataset = _open(folder, "tokens", shuffle=True).map(tokens_of).batched(BATCH, collation_fn=stack)
    return walk_tensors(wds.WebLoader(dataset, batch_size=None, num_workers=workers))


def _tokens_joined(data: Data, folder: Path, *, workers: int, size: int) -> Iterator[int]:
    dataset = _open(folder, "tokens", shuffle=True).map(raw).batched(size, collation_fn=join)
    if workers == 0:
        return walk_tensors(cut(dataset))
    return walk_tensors(cut(wds.WebLoader(dataset, batch_size=None, num_workers=workers)))


ROUTES = {
    "text_in_order": {
        "plain": partial(_plain, shuffle=False),
        "one map": partial(_mapped, shuffle=False),
    },
    "text_shuffled": {
        "plain": partial(_plain, shuffle=True),
        "one map": partial(_mapped, shuffle=True),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens, workers=0),
        "joined(64)": partial(_tokens_joined, workers=0, size=BATCH),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens, workers=2),
        "joined(64)": partial(_tokens_joined, workers=2, size=BATCH),
        "joined(1024), cut": partial(_tokens_joined, workers=2, size=1_024),
    },
}
