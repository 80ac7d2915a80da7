"""The work on one row, which every loader does with the same functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.feeding.codec import codec

EOS = 0
WEIGHTS = (0.7, 0.3)
SHORTEST = 600


@dataclass(frozen=True)
class Scale:
    """Sizes of the data, the batches and the models."""

    token_rows: int = 131_072
    length: int = 2_048
    sequences: int = 32
    vocabulary: int = 32_768
    documents: int = 60_000
    images: int = 40_960
    distinct_images: int = 8_192
    image_size: tuple[int, int] = (320, 426)
    image_bytes: int = 38_000
    crop: int = 224
    image_batch: int = 256
    classes: int = 1_000
    layers: int = 8
    width: int = 512
    shards: int = 16

    @property
    def smoke(self) -> Scale:
        """The same with sizes that run anywhere within seconds. Its rates mean nothing."""
        return replace(
            self, token_rows=512, length=64, sequences=2, documents=600, images=96, distinct_images=8,
            image_size=(48, 64), image_bytes=1_500, crop=32, image_batch=8, classes=10, layers=1, width=32, shards=2,
        )  # fmt: skip


def crop(jpeg: bytes, generator: np.random.Generator, size: int) -> Any:
    """Return a random crop of a JPEG as a uint8 tensor of [3, size, size]."""
    image = codec().decode(jpeg)
    _, height, width = image.shape
    top, left = generator.integers(height - size + 1), generator.integers(width - size + 1)
    return image[:, top : top + size, left : left + size].contiguous()


@dataclass(frozen=True)
class Crop:
    """Function of a map: a row with a JPEG to a row with an image."""

    size: int

    @property
    def __name__(self) -> str:
        return f"crop {self.size}"

    def __call__(self, jpeg: bytes, generator: np.random.Generator) -> dict[str, Any]:
        return {"image": crop(jpeg, generator, self.size)}


def is_long(text: str) -> bool:
    """Return True for a document that is kept: about nine in ten."""
    return len(text) >= SHORTEST


def words(count: int = 50_000) -> list[str]:
    """Return distinct words, always the same, the most frequent (and shortest) first."""
    rng = np.random.default_rng(11)
    lengths = np.clip(rng.poisson(3.2 + 4.0 * np.linspace(0, 1, count)), 1, 14).astype(int)
    letters = rng.integers(97, 123, int(lengths.sum()), dtype=np.uint8).tobytes().decode("ascii")
    ends = np.cumsum(lengths)
    return list(dict.fromkeys(letters[end - n : end] for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)))


class Tokenizer:
    """Words to ids: frequent words have an id, others are split greedily into pieces of three bytes or fewer.

    Deterministic, and called like a tokenizer of transformers. On the same texts a byte-level BPE of ``tokenizers``
    with one thread takes about as long for a text.
    """

    _WORD = re.compile(r" ?[a-z]+| ?[^\sa-z]+|\s+")

    def __init__(self, vocabulary: int = 32_768) -> None:
        singles = [bytes([byte]) for byte in range(256)]
        letters = singles[97:123]
        pieces = [first + second for first in (b" ", *letters) for second in letters]
        pieces += [first + second + third for first in letters for second in letters for third in letters[::4]]
        self._pieces = {piece: number for number, piece in enumerate([*singles, *pieces], EOS + 1)}
        room = vocabulary - len(self._pieces) - 1
        self._words = {f" {word}": number for number, word in enumerate(words()[:room], len(self._pieces) + 1)}

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        known, ids = self._words.get, list[int]()
        for word in self._WORD.findall(text):
            number = known(word)
            if number is not None:
                ids.append(number)
            else:
                ids += self._split(word.encode())
        return ids

    def _split(self, word: bytes) -> list[int]:
        pieces, ids, start = self._pieces, list[int](), 0
        while start < len(word):
            size = 3
            while (number := pieces.get(word[start : start + size])) is None:
                size -= 1
            ids.append(number)
            start += min(size, len(word) - start)
        return ids
