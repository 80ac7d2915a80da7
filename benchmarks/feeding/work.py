"""The work on one row, which every loader does with the same functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
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
    """Byte-pair encoding, without a cache: texts to ids, always the same. Called like a tokenizer of transformers.

    A text of 2.2 KB takes 1.3 ms of CPU, and 1.7 ms with a byte-level BPE of ``tokenizers`` (Python 3.11, aarch64).
    """

    _WORD = re.compile(r" ?[a-z]+| ?[^\sa-z]+|\s+")
    _NO_PAIR = 1 << 30

    def __init__(self, vocabulary: int = 32_768) -> None:
        # Every beginning of a frequent word is a token: words are merged from pairs, the most frequent to one token.
        beginnings = (f" {word}"[:size].encode() for word in words() for size in range(2, len(word) + 2))
        singles = (bytes([byte]) for byte in range(256))
        tokens = islice(dict.fromkeys(chain(singles, beginnings)), vocabulary - 1 - EOS)
        self._ids = {token: number for number, token in enumerate(tokens, EOS + 1)}

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [number for word in self._WORD.findall(text) for number in self._merged(word.encode())]

    def _merged(self, word: bytes) -> list[int]:
        """Merge the adjacent parts with the lowest id until none are left. A word that is a token needs no merging."""
        ids, none = self._ids, self._NO_PAIR
        if word in ids:
            return [ids[word]]
        parts = [word[i : i + 1] for i in range(len(word))]
        pairs = [ids.get(first + second, none) for first, second in pairwise(parts)]
        while pairs and (lowest := min(pairs)) < none:
            at = pairs.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            del pairs[at]
            if at:
                pairs[at - 1] = ids.get(parts[at - 1] + parts[at], none)
            if at < len(pairs):
                pairs[at] = ids.get(parts[at] + parts[at + 1], none)
        return [ids[part] for part in parts]
