"""The data of a command: paths, a table, a folder of save_to_disk, a dataset in Hugging Face's cache, or a function."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midepoch.errors import DataNotFoundError, FormatError, MidepochError

if TYPE_CHECKING:
    from midepoch.dataset import Dataset
    from midepoch.loader import Loader

DATA = typer.Argument(
    help="Files, globs or a folder, on disk or in an object store; a folder of save_to_disk; or the name of a Hugging "
    "Face dataset that was loaded before.",
    show_default=False,
)
Data = Annotated[list[str], DATA]
_READERS = ("delta", "iceberg", "lance", "megatron", "tokens")
"""Formats with functions of their own, such as ``from_delta``."""
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Tables and tokens: delta, iceberg, lance, megatron, tokens:LENGTH or tokens:DTYPE:LENGTH, such as "
        "tokens:uint16:1024. CSV files with another delimiter: csv:DELIMITER. Files whose format cannot be detected: "
        "arrow, parquet, orc, csv, jsonl, text, tar, mds, litdata, image, audio, video.",
    ),
]
Split = Annotated[str | None, typer.Option(help="A split, or a part of one: 'train[:10%]'.")]
Config = Annotated[str | None, typer.Option(help="The configuration of a Hugging Face dataset.")]
Storage = Annotated[
    list[str] | None,
    typer.Option("--storage", help="KEY=VALUE for the object store, such as endpoint_override=http://… Repeatable."),
]
Step = Annotated[int | None, typer.Option(help="The step of the checkpoints. Default: the latest.")]
Part = Annotated[str | None, typer.Option(help="The part of a checkpoint: data, or the name of an extra.")]
Columns = Annotated[str | None, typer.Option(help="Only these columns, separated by commas.")]
Scope = Annotated[str | None, typer.Option(help="Scope of the shuffle: rows, window or files.")]
Window = Annotated[int | None, typer.Option(help="Blocks per window of the shuffle.")]
Made = Annotated[
    str | None,
    typer.Option(help="A function that returns the dataset or loader: package.module:function or file.py:function."),
]


def open_data(
    data: Sequence[str],
    split: str | None = None,
    config: str | None = None,
    storage: Sequence[str] | None = None,
    format: str | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset that the arguments of a command name. ``options`` are passed to the function that opens it."""
    from midepoch.open import from_files, load_dataset, load_from_disk

    given = {"storage_options": _pairs(storage) or None, **options}
    name, colon, value = (format or "").partition(":")
    if name.lower() in _READERS:
        part = _part_of_files(split, config)
        return part(_tables_or_tokens(data, str(format), given))
    refuse_function(*data)
    path = Path(data[0]).expanduser()
    if len(data) == 1 and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        try:
            return load_from_disk(path, split, **options)
        except ValueError as problem:
            raise ValueError(str(problem).replace("split=…", "--split")) from problem
    if len(data) == 1 and not is_path(data[0]):
        if split is None:
            raise ValueError(
                f"there is no file or folder {data[0]}. For a Hugging Face dataset of that name pass --split."
            )
        return load_dataset(data[0], config, split=split, **options)
    part = _part_of_files(split, config)
    has_delimiter = bool(colon) and name.lower() == "csv"
    if has_delimiter:
        given["delimiter"] = value
    try:
        paths = data[0] if len(data) == 1 else list(data)
        return part(from_files(paths, format=name if has_delimiter else format, **given))
    except (DataNotFoundError, FormatError) as problem:
        if (call := re.search(rf"midepoch\.from_({'|'.join(_READERS)})\(|delimiter='(.+?)'", str(problem))) is None:
            raise
        option = f"{call[1]}:DTYPE:LENGTH" if call[1] == "tokens" else call[1] or f"$'csv:{call[2]}'"
        raise type(problem)(f"{problem} On the command line, pass --format {option}.") from None


def shuffled(ds: Dataset, seed: int | None, scope: str | None, window: int | None) -> Dataset:
    """Return the data in the order of ``--shuffle``, ``--scope`` and ``--window``."""
    if seed is None and (scope is not None or window is not None):
        raise ValueError("--scope and --window are settings of a shuffle. Pass its seed with --shuffle.")
    return ds if seed is None else ds.shuffle(seed, scope, window)


def _tables_or_tokens(data: Sequence[str], format: str, options: dict[str, Any]) -> Dataset:
    import midepoch

    name, *values = format.lower().split(":")
    first: Any = list(data) if name in ("tokens", "megatron") else data[0]
    if name == "tokens":
        if not 1 <= len(values) <= 2 or not values[-1].isdecimal():
            raise ValueError(f"--format takes tokens:LENGTH or tokens:DTYPE:LENGTH, got {format!r}")
        options |= {"sequence_length": int(values[-1]), "dtype": values[0] if len(values) == 2 else None}
    elif values:
        raise ValueError(f"--format {name} takes no value, got {format!r}")
    elif len(data) > 1 and name != "megatron":
        raise ValueError(f"--format {name} takes one table, got {len(data)} paths")
    opened: Dataset = getattr(midepoch, f"from_{name}")(first, **options)
    return opened


def is_path(text: str) -> bool:
    """Return True if a text names files: it exists, is an address or a glob, or looks like nothing else."""
    looks = "://" in text or any(sign in text for sign in "*?[") or text.startswith((".", "/", "~"))
    return looks or os.path.exists(text) or text.count("/") > 1 or bool(Path(text).suffix)


def _part_of_files(split: str | None, config: str | None) -> Callable[[Dataset], Dataset]:
    """Return a function that chooses the part of files that ``--split`` names."""
    from midepoch.sources.splits import parse_split

    if config is not None:
        raise ValueError("--config is for a Hugging Face dataset that is named, and these are files. Omit it.")
    if split is None:
        return lambda ds: ds
    if "[" not in split or not split.endswith("]"):
        raise ValueError(
            f"files have no splits: --split can only choose a part, such as 'train[:10%]', got {split!r}. For a folder "
            f"of that name, add it to the path: DATA/{split}."
        )
    part, *more = parse_split(split)
    if more:
        raise ValueError(f"--split takes one part of files, got {split!r}")
    return lambda ds: ds.slice(*part.rows(len(ds)))


def _pairs(given: Sequence[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in given or ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ValueError("--storage takes KEY=VALUE, got a text without a key or without '='")
        found[key] = {"true": True, "false": False}.get(value.lower(), value)
    return found


def refuse_function(*given: str) -> None:
    """Raise ValueError if data is named as a function is."""
    if named := next((one for one in given if re.fullmatch(r".*\.py:\w+", one)), None):
        raise ValueError(f"{named} is a function, and not data: pass it as --dataset {named} (bench, diff, plan).")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say which code of the user failed, and where."""
    try:
        yield
    except (MidepochError, ModuleNotFoundError):
        raise
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        place = f" at {last.filename}:{last.lineno}" * (not isinstance(problem, SyntaxError))  # which says where
        raise ValueError(f"{what} failed{place}: {type(problem).__name__}: {problem}. Fix it.") from problem


def made_by(name: str) -> Dataset | Loader:
    """Return the result of a function named as file.py:function or package.module:function."""
    from midepoch.dataset import Dataset
    from midepoch.loader import Loader

    module, _, function = name.rpartition(":")
    if not module or not function:
        raise ValueError(f"--dataset takes package.module:function or file.py:function, got {name!r}")
    is_file = module.endswith(".py")
    if is_file and not os.path.isfile(module):
        raise DataNotFoundError(f"there is no file {module}. Check the path.")
    sys.path.insert(0, str(Path(module).resolve().parent) if is_file else os.getcwd())
    try:
        with _named(module):
            known = (
                runpy.run_path(module, run_name="midepoch_cli") if is_file else vars(importlib.import_module(module))
            )
    except ModuleNotFoundError as problem:
        if is_file:
            raise ValueError(f"{module} imports {problem.name}, which is not installed here. Install it.") from None
        if problem.name is None or not f"{module}.".startswith(f"{problem.name}."):
            raise  # one that the module imports
        raise ValueError(
            f"there is no module {problem.name!r} for --dataset {name}. Use the path of a file, such as "
            "train.py:make_dataset."
        ) from None
    factory = known.get(function)
    if isinstance(factory, (Dataset, Loader)):
        kind = type(factory).__name__.lower()
        raise ValueError(f"{function!r} in {module} is a {kind}. Name a function without arguments that returns it.")
    if not callable(factory):
        names = [name for name, each in known.items() if inspect.isfunction(each) and not name.startswith("_")]
        raise ValueError(f"there is no function {function!r} in {module}. There are: {', '.join(names) or 'none'}.")
    try:
        inspect.signature(factory).bind()
    except TypeError as problem:
        raise ValueError(f"{function!r} in {module} must be a function without arguments: {problem}.") from None
    with _named(f"{function!r} in {module}"):
        made = factory()
    made = made[0] if isinstance(made, tuple) and made else made
    made = getattr(made, "_loader", made)  # of a StructuredDataset
    if not isinstance(made, (Dataset, Loader)):
        raise TypeError(f"{name} must return a dataset or loader of midepoch, got {type(made).__name__}")
    return made


def data_given(
    dataset: str | None, paths: list[str] | None, state: Any, storage: list[str] | None, format: str | None
) -> Any:
    """Return the result of ``--dataset``, or the files of ``--data``, or None if neither is given.

    Files are in the order that the state describes, so that only the data itself can differ.
    """
    from midepoch.state.format import parse

    if dataset is not None or not paths:
        return None if dataset is None else made_by(dataset)
    one = state[0] if isinstance(state, list) else state
    for reason, holds in {
        f"its pipeline changes the number of rows ({one['pipeline']})": parse(one).in_lanes,
        "the data was filtered or partitioned": one.get("_filters") or one.get("_partitioning"),
        "rows were selected one by one, or shuffled before": re.fullmatch(r"\d+:\d+", one["selection"]) is None,
        "rows were drawn by weights": one.get("weights"),
    }.items():
        if holds:
            raise ValueError(f"the state says more than --data does: {reason}. Use --dataset.")
    ds = open_data(paths, storage=storage, format=format)
    start, stop = map(int, one["selection"].split(":"))
    if stop <= len(ds):
        ds = ds.slice(start, stop)
    if one["scope"] != "none":
        ds = ds.shuffle(one["seed"], one["scope"], one["window"])
    for kind in one["pipeline"].split(","):
        if kind != "none":
            ds = ds.map(_nothing, batched="batched" in kind)
    return ds


def _nothing(_: Any) -> Any:
    return {}
