"""What people know from Hugging Face's datasets does here what it does there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import midepoch
from data import dataset_of, numbered

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def table() -> pa.Table:
    kinds = pa.array([["dog", "cat", None, "bird"][i % 4] for i in range(60)])
    return numbered(0, 60).append_column("kind", kinds)


@pytest.fixture(scope="module")
def ds(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> midepoch.Dataset:
    return dataset_of(tmp_path_factory.mktemp("habits"), table, 7)


@pytest.fixture(scope="module")
def theirs(table: pa.Table) -> Any:
    return datasets.Dataset(table)


def ids(ds: Any) -> list[int]:
    return [row["id"] for row in ds]


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({}, (45, 15)),
        ({"test_size": 0.1}, (54, 6)),
        ({"test_size": 7}, (53, 7)),
        ({"train_size": 0.5}, (30, 30)),
        ({"train_size": 11, "test_size": 0.31}, (11, 19)),
        ({"test_size": 0.25, "shuffle": False}, (45, 15)),
    ],
)
def test_split_sizes_are_theirs(ds: midepoch.Dataset, theirs: Any, arguments: Any, sizes: tuple[int, int]) -> None:
    ours, expected = ds.train_test_split(**arguments), theirs.train_test_split(**arguments)
    assert (len(ours["train"]), len(ours["test"])) == sizes == (len(expected["train"]), len(expected["test"]))
    train, test = ids(ours["train"]), ids(ours["test"])
    assert not set(train) & set(test) and len(set(train) | set(test)) == sum(sizes)
    assert train == sorted(train) and test == sorted(test)
    if arguments.get("shuffle") is False:
        assert (train, test) == (ids(expected["train"]), ids(expected["test"]))


@pytest.mark.parametrize("arguments", [{"test_size": 0.2}, {"test_size": 20}, {"test_size": 11, "train_size": 31}])
def test_a_stratified_split_has_the_shares_of_theirs(arguments: Any, tmp_path: Path) -> None:
    labels = [0] * 61 + [1] * 27 + [2] * 12
    np.random.default_rng(1).shuffle(labels)
    table = numbered(0, 100).append_column("label", pa.array(labels))
    features = datasets.Features({"label": datasets.ClassLabel(names=["a", "b", "c"])})
    expected = datasets.Dataset(table.select(["label"]), fingerprint="1").cast(features)
    theirs = expected.train_test_split(**arguments, stratify_by_column="label", seed=1)
    ds = dataset_of(tmp_path, table, 7)
    parts = ds.shuffle(seed=3).train_test_split(**arguments, stratify_by_column="label", seed=1)
    for name, part in parts.items():
        counts = np.bincount([row["label"] for row in part])
        assert counts.sum() == len(part) == len(theirs[name])
        assert np.abs(counts - np.bincount(labels) * len(part) / 100).max() < 1  # each is rounded, up or down
        assert np.abs(counts - np.bincount(theirs[name]["label"])).max() <= 1  # they draw which one is rounded up
    both = [sorted(ids(part)) for part in parts.values()]
    assert not set(both[0]) & set(both[1]) and len(both[0]) + len(both[1]) == sum(map(len, parts.values()))
    again = ds.train_test_split(**arguments, stratify_by_column="label", seed=1)
    assert ids(again["test"]) == both[1] and ids(again["train"]) == both[0]
    assert ids(ds.train_test_split(**arguments, stratify_by_column="label", seed=2)["test"]) != both[1]
    of_texts = ds.map(lambda row: {"text": "ab"[row["label"] > 0]}).train_test_split(0.1, stratify_by_column="text")
    assert sorted(row["text"] for row in of_texts["test"]) == ["a"] * 6 + ["b"] * 4


def test_every_row_is_as_likely_in_a_stratified_test(tmp_path: Path) -> None:
    table = numbered(0, 40).append_column("label", pa.array([number % 4 == 0 for number in range(40)]))
    ds, counts = dataset_of(tmp_path, table, 7), np.zeros(40)
    for seed in range(300):
        counts[ids(ds.train_test_split(8, seed=seed, stratify_by_column="label")["test"])] += 1
    assert counts.min() > 30 and counts.max() < 95  # 60 expected, 7 the standard deviation


def test_classes_that_cannot_be_in_both_parts(ds: midepoch.Dataset) -> None:
    with pytest.raises(midepoch.ColumnError, match=r"train_test_split: column 'kind' is null in 15 rows.*map\(\)"):
        ds.train_test_split(0.2, stratify_by_column="kind")
    kinds = ds.map(lambda row: {"kind": row["kind"] or "none"})
    assert len(kinds.train_test_split(4, stratify_by_column="kind")["test"]) == 4
    with pytest.raises(
        ValueError, match=r"each of 4 classes in both parts, but the sizes are 57 and 3\. Choose larger"
    ):
        kinds.train_test_split(3, stratify_by_column="kind")


def test_a_split_is_drawn_by_its_seed_and_resumes(ds: midepoch.Dataset) -> None:
    parts = [ds.train_test_split(0.2, seed=seed) for seed in (0, 0, 1)]
    assert ids(parts[0]["test"]) == ids(parts[1]["test"]) != ids(parts[2]["test"])
    assert ids(ds.shuffle(seed=5).train_test_split(0.2)["test"].shuffle(seed=1)) != ids(parts[0]["test"])
    counts = np.zeros(60)
    for seed in range(300):
        counts[ids(ds.train_test_split(0.2, seed=seed)["test"])] += 1
    assert counts.min() > 30 and counts.max() < 95  # 60 expected, 7 the standard deviation
    loader = parts[0]["train"].shuffle(seed=1).loader(5)
    first = next(iter(loader))["id"].tolist()
    other = parts[1]["train"].shuffle(seed=1).loader(5)
    other.load_state_dict(loader.state_dict())
    assert sorted([*first, *(i for batch in other for i in batch["id"].tolist())]) == ids(parts[0]["train"])
    with pytest.raises(midepoch.CheckpointMismatchError, match="selection"):
        parts[2]["train"].shuffle(seed=1).loader(5).load_state_dict(loader.state_dict())


def test_columns_by_name_shape_and_values(ds: midepoch.Dataset, theirs: Any) -> None:
    assert (ds.num_rows, ds.num_columns, ds.shape) == (theirs.num_rows, theirs.num_columns, theirs.shape)
    assert list(ds["score"]) == list(theirs["score"]) and ds["text"][3] == theirs["text"][3]
    assert ds.unique("kind") == theirs.unique("kind")
    assert sorted(ds.shuffle(seed=1).unique("id")) == list(range(60))
    assert ds.map(lambda row: {"m": row["id"] % 3}).unique("m") == [0, 1, 2]
    assert ds.to_pandas().equals(theirs.to_pandas())
    assert ds.filter(lambda row: row["id"] > 57).to_pandas()["id"].tolist() == [58, 59]
    assert list(ds.filter(lambda row: row["id"] > 57)["id"]) == [58, 59]
    torch_column = ds.with_format("torch")["score"]
    assert torch.equal(torch_column[:3], torch.tensor([0.0, 0.5, 1.0])) and torch_column[1] == 0.5
    assert ds.rename_column("id", "n").column_names == ["n", *ds.column_names[1:]]
    assert ds.with_format("numpy", columns=["id"])[:2].keys() == {"id"}
    begun = ds.shuffle(seed=1)
    begun.load_state_dict({**_state_after(begun, 9)})
    assert len(begun.unique("id")) == len(begun.to_pandas()) == 60, "whatever the position"


def _state_after(ds: midepoch.Dataset, rows: int) -> dict[str, Any]:
    iterator = iter(ds)
    for _ in range(rows):
        next(iterator)
    return ds.state_dict()


def test_class_labels_are_theirs(ds: midepoch.Dataset, theirs: Any) -> None:
    ours, expected = ds.class_encode_column("kind"), theirs.class_encode_column("kind")
    assert ours.features["kind"].names == ["bird", "cat", "dog"]
    assert list(ours["kind"])[:4] == [2, 1, None, 0]
    known = [value for value in list(expected["kind"])[:4] if value is not None]
    assert known[:2] == [expected.features["kind"].names.index(name) for name in ("dog", "cat")]
    assert ds.class_encode_column("id").features["id"].num_classes == 60
    assert ours.column_names == ds.column_names
    label = datasets.ClassLabel(names=["bird", "cat", "dog"])
    assert list(ds.cast_column("kind", label)["kind"])[:4] == [2, 1, None, 0]
    assert ds.cast_column("kind", label).features["kind"] == label
    assert ds.cast_column("id", datasets.Value("int16")).schema.field("id").type == pa.int16()
    assert ds.cast_column("tokens", datasets.List(datasets.Value("int64"))).schema.field("tokens").type == pa.list_(
        pa.int64()
    )


def test_classes_are_those_of_all_ranks_and_follow_their_column(ds: midepoch.Dataset) -> None:
    shard = ds.shuffle(seed=1).shard(2, 0)
    encoded = shard.class_encode_column("text")
    assert encoded.features["text"].num_classes == 60 and len(list(encoded)) == 30
    assert shard.to_pandas()["id"].tolist() == shard.unique("id") == ids(shard)
    renamed = ds.class_encode_column("kind").rename_column("kind", "label").rename_column("text", "kind")
    assert renamed.features["label"].names == ["bird", "cat", "dog"] and renamed.features["kind"].dtype == "string"
    overwritten = ds.class_encode_column("kind").map(lambda row: {"kind": "text"})
    assert overwritten.features["kind"].dtype == "string"
    assert renamed.cache().features["label"].names == ["bird", "cat", "dog"]


def test_columns_of_streams_and_of_loaded_states(ds: midepoch.Dataset) -> None:
    stream = ds.shuffle(seed=1).filter(lambda row: row["id"] % 2 == 0)
    stream.load_state_dict(_state_after(stream, 5))
    expected = ids(ds.shuffle(seed=1).filter(lambda row: row["id"] % 2 == 0))
    assert np.array(stream["id"]).tolist() == list(stream["id"]) == stream.unique("id") == expected
    late = ds.map(lambda row: {"late": None if row["id"] < 55 else "x"})
    assert late.unique("late") == [None, "x"]
    with pytest.raises(midepoch.ColumnError, match=r"'tokens' contains .*list.*Map it to numbers or texts"):
        ds.unique("tokens")


def test_a_transform_gets_batches_and_replaces_all_columns(ds: midepoch.Dataset, theirs: Any) -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {"length": [len(text) for text in batch["text"]], "array": [np.full(2, i) for i in batch["id"]]}

    ours, expected = ds.with_transform(transform), theirs.with_transform(transform)
    assert ours.column_names == ["length", "array"]
    for i in (0, 59):
        assert ours[i]["length"] == expected[i]["length"] and np.array_equal(ours[i]["array"], expected[i]["array"])
    batch = next(iter(ours.loader(4, num_workers=1)))
    assert batch["length"].tolist() == expected[:4]["length"] and batch["array"].shape == (4, 2)
    assert ds.with_transform(lambda batch: {"seen": [sorted(batch)]}, columns=["id"])[0] == {"seen": ["id"]}
    for bad in (lambda batch: {"x": 1}, lambda batch: {"x": "a"}, lambda batch: {"x": [1, 2]}, lambda batch: [1]):
        with pytest.raises(midepoch.MapError, match="transform"):
            ds.with_transform(bad)[0]


def test_types_and_features_after_maps(ds: midepoch.Dataset) -> None:
    mapped = ds.map(lambda row: {"half": row["id"] / 2, "words": row["text"].split()})
    assert mapped.schema.field("half").type == pa.float64() and mapped.schema.field("words").type == pa.list_(
        pa.string()
    )
    assert mapped.features["half"] == datasets.Value("float64") and mapped.features["id"] == datasets.Value("int64")
    packed = ds.pack(8, column="tokens", labels=True)
    assert packed.schema.names == packed.column_names == ["tokens", "position_ids", "segment_ids", "labels"]
    assert packed.schema.field("labels").type.value_type == pa.int64()
    assert ds.filter(lambda row: False).map(lambda row: {"n": 1}).column_names == []
    mixed = midepoch.mix([ds.select_columns("id"), ds.select_columns("id")])
    assert mixed.features == datasets.Features({"id": datasets.Value("int64")})


def test_names_for_mix_and_concat(ds: midepoch.Dataset) -> None:
    a, b = ds.take(10), ds.skip(10).take(20)
    weights = [0.3, 0.7]
    assert ids(midepoch.interleave_datasets([a, b], weights, seed=3)) == ids(midepoch.mix([a, b], weights, seed=3))
    both = midepoch.interleave_datasets([a, b], stopping_strategy="all_exhausted")
    assert ids(both) == ids(midepoch.mix([a, b], stop="all"))
    assert ids(midepoch.concatenate_datasets([a, b])) == list(range(30))
    wide = midepoch.concatenate_datasets([a, a.rename_column("id", "n").select_columns("n")], axis=1)
    assert wide.column_names[-1] == "n"


def test_loader_has_what_a_dataloader_has(ds: midepoch.Dataset) -> None:
    numbers = ds.select_columns(["id", "score"])
    loader = numbers.loader(4, num_workers=2, drop_last=True, prefetch_factor=3, timeout=60, collate_fn=list)
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.prefetch_factor) == (4, 2, True, 3)
    assert loader.dataset is numbers and loader.collate_fn is list and loader.timeout == 60
    assert not loader.pin_memory and not loader.persistent_workers and loader.worker_init_fn is None
    single = numbers.loader(None)
    assert single.batch_size is None and list(single)[:2] == [{"id": 0, "score": 0.0}, {"id": 1, "score": 0.5}]
    assert len(single) == 60
    assert list(numbers.loader(None, collate_fn=lambda row: row["id"])) == list(range(60))
    (row,) = list(numbers.take(1).with_format("torch").loader(None, num_workers=1))
    assert torch.equal(row["id"], torch.tensor(0))
    loader = numbers.shuffle(seed=1).loader(None)
    rows = iter(loader)
    first = [next(rows)["id"] for _ in range(7)]
    state, rest = loader.state_dict(), [row["id"] for row in rows]
    other = numbers.shuffle(seed=1).loader(4)
    other.load_state_dict(state)
    assert [i for batch in other for i in batch["id"].tolist()] == rest and sorted(first + rest) == list(range(60))


def test_a_dataset_is_one_of_torch(ds: midepoch.Dataset) -> None:
    assert isinstance(ds, torch.utils.data.Dataset) and isinstance(ds, torch.utils.data.IterableDataset)
    assert not isinstance(ds.loader(2), torch.utils.data.Dataset)
    batch = next(iter(torch.utils.data.DataLoader(ds.select_columns("id"), batch_size=4)))
    assert batch["id"].tolist() == [0, 1, 2, 3]
    train, _ = torch.utils.data.random_split(ds, [0.5, 0.5])
    with pytest.raises(TypeError, match=r"random_split.*train_test_split"):
        next(iter(torch.utils.data.DataLoader(train, batch_size=2)))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("process", "map"),
        ("thread", "filter"),
        pytest.param("process", "filter", marks=pytest.mark.slow),
        pytest.param("thread", "map", marks=pytest.mark.slow),
    ],
)
def test_workers_are_initialised_and_their_silence_is_an_error(
    ds: midepoch.Dataset, step: str, kind: str, tmp_path: Path
) -> None:
    note, gate = tmp_path / "note", tmp_path / "gate"

    def init(number: int) -> None:
        with note.open("a") as file:
            file.write(f"{number} ")

    def work(row: dict[str, Any]) -> Any:
        import time

        while row["id"] == 40 and not gate.exists():
            time.sleep(0.01)
        return {"a": 1} if step == "map" else True

    made = getattr(ds.select_columns("id"), step)(work)
    batches = iter(made.loader(4, num_workers=2, worker_type=kind, worker_init_fn=init, timeout=1))
    opening = threading.Timer(2, gate.touch)  # a thread cannot be stopped, and the loader waits for it some time
    opening.start()
    with pytest.raises(midepoch.WorkerError, match=r"delivered nothing within timeout=1 second"):
        list(batches)
    opening.join()
    assert sorted(note.read_text().split()) == ["0", "1"]

    def wrong(number: int) -> None:
        raise RuntimeError(f"no database for worker {number}")

    with pytest.raises(RuntimeError, match="no database for worker"):
        list(made.loader(4, num_workers=2, worker_type=kind, worker_init_fn=wrong))
