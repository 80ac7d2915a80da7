"""Opening tokenized data in place: Megatron's indexed datasets, and flat files of tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import index as as_int
from typing import Any

import numpy as np

from midepoch._internal.hints import hinted, is_array
from midepoch.dataset import Dataset, habits
from midepoch.dataset.combine import mix
from midepoch.errors import DataNotFoundError
from midepoch.open.files import DEFAULT_CACHE_BYTES, Opening, from_files
from midepoch.sources.files import DataFiles, PathLike, expand, paths_of, resolved
from midepoch.sources.formats.tokens import DTYPES, MOST_TOKENS
from midepoch.sources.listing import files_at
from midepoch.sources.manifests import is_litdata, refuse_chunks
from midepoch.storage.stores import Entry, Retry, Store

_log = logging.getLogger("midepoch")


@hinted(habits.OPEN["from_tokens"])
def from_tokens(
    paths: PathLike | Iterable[PathLike],
    sequence_length: int,
    *,
    dtype: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    validate: bool = True,
    on_error: str = "raise",
) -> Dataset:
    """Return flat files of tokens, cut into sequences of ``sequence_length`` tokens: the column ``input_ids``.

    ``.npy`` files, and raw files (``.bin``, ``.npy`` of OLMo, ``.ds`` of datatrove) whose type is ``dtype``: "uint16",
    "uint32", …. The headers of NumPy and of llm.c are detected, and have their own type. Local files are mapped and
    nothing is converted, so any length can be chosen each time. Tokens at the end of a file that fill no sequence are
    left out. For a model that shifts its labels itself, pass its context length; otherwise one token more. A folder of
    LitData's ``TokensLoader`` is read likewise, and has its own type.

    The other arguments are those of ``from_files``.

        ds = midepoch.from_tokens("fineweb/*.bin", 1025, dtype="uint16").cast({"input_ids": "int64"})
    """
    length = as_int(sequence_length) if hasattr(sequence_length, "__index__") else 0
    if isinstance(sequence_length, bool) or not 1 <= length <= MOST_TOKENS:
        raise ValueError(f"sequence_length must be a number of tokens from 1 to {MOST_TOKENS}, got {sequence_length!r}")
    form = f"tokens:{_dtype_name(dtype)}:{length}"
    opening = Opening(None, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    if is_array(paths):
        array: Any = paths
        file = str(getattr(array, "filename", "tokens.bin"))
        raise TypeError(
            f"from_tokens reads tokens in files, got a {type(paths).__name__}. Pass its file, from_tokens({file!r}, "
            f"{length}, dtype={str(array.dtype)!r}), or write one: numpy.save('tokens.npy', tokens)."
        )
    texts = paths_of(paths)
    where = {"storage_options": storage_options, "filesystem": filesystem, "retry": retry}
    store, given = resolved(texts, fresh=force_reindex, **where)
    if dtype is None and not os.path.splitext(texts[0])[1].replace(".json", "") and is_litdata(store, given[0]):
        return from_files(
            texts, format=f"litdata:{length}", cache_dir=cache_dir, cache_bytes=cache_bytes,
            index_dir=index_dir, force_reindex=force_reindex, validate=validate, on_error=on_error, **where,
        )  # fmt: skip

    def find() -> DataFiles:
        found = tuple(entry for part in expand(store, given, texts, "tokens") for entry in part.entries)
        refuse_chunks(store, found)
        return DataFiles(form, found)

    index = opening.index(store, given, form, find, validate=validate)
    if not index.starts[-1]:
        raise DataNotFoundError(
            f"there are no rows in {store.name(index.files[0].path)}: no file has {sequence_length:,} tokens, the "
            "length of a sequence. Choose a smaller sequence_length, or check the path."
        )
    ds = opening.dataset(index, store)
    if dtype is not None and store.local:
        _check_dtype(ds)
    return ds


def _check_dtype(ds: Dataset) -> None:
    """Log that the first tokens look like those of another type: each is two of them, or every second one is small."""
    tokens = next(iter(ds.with_format("numpy")))["input_ids"][:1024]
    size = tokens.dtype.itemsize
    wide = size > 2
    if len(tokens) < 16 or size == 1:
        return
    if np.median(tokens) >= 1 << 20 if wide else tokens[1::2].max() < 8 <= tokens[::2].max():
        other = "uint16" if wide else "uint32"
        _log.warning("the first tokens are %s: is their type dtype=%r?", ", ".join(map(str, tokens[:6])), other)


@hinted(habits.OPEN["from_megatron"])
def from_megatron(
    blend: PathLike | Sequence[Any],
    weights: Sequence[float] | None = None,
    *,
    seed: int | None = None,
    stop: str = "all",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    validate: bool = True,
    on_error: str = "raise",
) -> Dataset:
    """Return documents of Megatron's indexed datasets (``.bin`` and ``.idx``): the column ``input_ids``.

    ``blend`` is a prefix, a folder, a glob or a list of them, which are read one after the other; or Megatron's own
    list of weights and prefixes, ``["0.7", "web_text_document", "0.3", "code_text_document"]``, or its pair
    ``([prefix, …], [weight, …])``. Weighted prefixes are mixed by ``mix(stop=…)``, each shuffled with ``seed`` if that
    is given. Weights count documents. Documents of several sequences also have their ``sequence_lengths``, and
    multimodal ones their ``modes``. Local files are mapped. The other arguments are those of ``from_files``.

        ds = midepoch.from_megatron(["0.7", "web_text_document", "0.3", "code_text_document"], seed=1).pack(4096)
    """
    prefixes, shares = _parsed(blend, weights)
    texts = paths_of(prefixes)
    where = {"storage_options": storage_options, "filesystem": filesystem, "retry": retry}
    store, given = resolved(texts, fresh=force_reindex, **where)
    counts: list[int] = []

    def find() -> DataFiles:
        groups = [_listed(store, path, text) for path, text in zip(given, texts, strict=True)]
        counts[:] = map(len, groups)
        return DataFiles("megatron", tuple(_entries(store, [each for group in groups for each in group])))

    opening = Opening(None, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    # One index for all prefixes, so that a blend of a hundred is one file to open. Its parts follow from a listing.
    index = opening.index(store, given, "megatron", find, validate=validate or shares is not None)
    if shares is None:
        ds = opening.dataset(index, store)
        return ds if seed is None else ds.shuffle(seed=seed)
    parts, first = [], 0
    for count in counts:
        part = opening.dataset(index.part(first, first + count), store)
        parts.append(part if seed is None else part.shuffle(seed=seed))
        first += count
    return mix(dict(zip(_names(texts), parts, strict=True)), shares, seed=seed or 0, stop=stop)


def _dtype_name(dtype: Any) -> str:
    if dtype is None:
        return ""
    try:
        kind = np.dtype(str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype)
        name = kind.name if kind.isnative else kind.str
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def _parsed(blend: Any, weights: Any) -> tuple[list[Any], list[float] | None]:
    """Return the prefixes of a blend, and their weights. None if it has none."""
    if isinstance(blend, tuple) and len(blend) == 2 and isinstance(blend[0], (list, tuple)):
        if weights is not None:
            raise TypeError(
                "the weights are given twice: in the pair of prefixes and weights, and as weights=…. Omit one."
            )
        blend, weights = blend
    listed = [blend] if isinstance(blend, str) or hasattr(blend, "__fspath__") else list(blend)
    if weights is None and len(listed) > 1 and _number(listed[0]) is not None:
        if len(listed) % 2 or any(_number(each) is None for each in listed[::2]):
            raise ValueError(
                f"a blend alternates between weights and prefixes, got {listed!r:.120}. Give each prefix one weight."
            )
        listed, weights = listed[1::2], [_number(each) for each in listed[::2]]
    if weights is not None and (isinstance(weights, str) or not hasattr(weights, "__len__")):
        raise TypeError(f"weights must be a list of numbers, one for each prefix, got {weights!r:.60}")
    if weights is not None and len(weights) != len(listed):
        raise ValueError(f"there are {len(weights)} weights for {len(listed)} prefixes. Give each prefix one weight.")
    return listed, None if weights is None else [float(each) for each in weights]


def _number(given: Any) -> float | None:
    try:
        return None if hasattr(given, "__fspath__") else float(given)
    except (TypeError, ValueError):
        return None


def _names(texts: Sequence[str]) -> list[str]:
    """Return names of sources: the last parts of their prefixes, as many as tell them apart."""
    paths = [text.rstrip("/").removesuffix(".idx").removesuffix(".bin").split("/") for text in texts]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"the blend contains a prefix twice: {', '.join(map(repr, texts))}. Add up its weights.")


def _listed(store: Store, path: str, text: str) -> list[Entry | str]:
    """Return the index and the tokens of each prefix that a path means: itself, or those in a folder or glob.

    Files that were not listed are returned as paths.
    """
    entries: dict[str, Entry] = {}
    if any(sign in path for sign in "*?[") or text.endswith("/") or (store.local and store.is_folder(path)):
        entries = {entry.path: entry for part in expand(store, [path], [text], "megatron") for entry in part.entries}
    prefixes = dict.fromkeys(each.removesuffix(".idx").removesuffix(".bin") for each in entries or [path])
    paths = [prefix + suffix for prefix in prefixes for suffix in (".idx", ".bin")]
    return [entries.get(each, each) for each in paths]


def _entries(store: Store, listed: Sequence[Entry | str]) -> list[Entry]:
    """Return the entries of all files. Those that were not listed are requested."""
    paths = [each for each in listed if isinstance(each, str)]
    found = files_at(store, paths, one_by_one=True)
    for path in paths:
        if path not in found:
            flat = path.endswith(".idx") and path.removesuffix(".idx") + ".bin" in found
            raise DataNotFoundError(
                f"{store.name(path)} does not exist. A Megatron prefix has two files, PREFIX.bin and PREFIX.idx: "
                + ("use midepoch.from_tokens for a .bin without an .idx." if flat else "check the path.")
            )
    return [found[each] if isinstance(each, str) else each for each in listed]
