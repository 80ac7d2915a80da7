"""Settings of Automodel's dataloader, for midepoch datasets: python nemo_automodel_config_job.py FOLDER."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nemo_automodel.components.datasets.loader import ThdPackingConfig, make_dataset_config

import midepoch
from midepoch.integrations.nemo_automodel import ResumableDataloaderConfig


def ragged(path: str, tokenizer: Any = None) -> midepoch.Dataset:
    assert tokenizer == "of the recipe"
    return midepoch.from_files(path)


def main(folder: str) -> None:
    rows = [
        {"input_ids": list(range(n, n + 1 + n % 5)), "labels": list(range(n + 1, n + 2 + n % 5))} for n in range(50)
    ]
    pq.write_table(pa.Table.from_pylist(rows), f"{folder}/data.parquet")
    dataset = make_dataset_config(ragged, {"path": f"{folder}/data.parquet"})

    def built(**settings: Any) -> Any:
        config = ResumableDataloaderConfig(dataset, **{"batch_size": 2, "global_batch_size": 12, **settings})
        return config.build(dp_rank=0, dp_world_size=2, tokenizer="of the recipe", pp_enabled=False)

    for workers in (0, 1):
        loader = built(shuffle=False, num_workers=workers)
        batches = list(loader)
        assert len(batches) == len(loader) == 3 * 4
        first = batches[0]["input_ids"][:, 0].tolist()
        longest = max(1 + n % 5 for n in first)  # padded to the longest of a micro-batch
        assert batches[0]["input_ids"].shape == batches[0]["labels"].shape == (2, longest)
        assert [int((row != -100).sum()) for row in batches[0]["labels"]] == [1 + n % 5 for n in first]
    assert built().loader.pipeline.node.shuffled and not built(shuffle=False).loader.pipeline.node.shuffled
    again = iter(built(collate_fn=len))
    assert [next(again) for _ in range(3)] == [2, 2, 2]
    for settings, problem in (
        ({"packing": ThdPackingConfig(packed_sequence_size=8)}, "packed_sequence is not supported"),
        ({"group_by_length": True}, "dataloader.group_by_length is not supported"),
        ({"batch_size": None}, "dataloader.batch_size of null is not supported"),
        ({"global_batch_size": 10}, "multiple of micro-batch × data-parallel ranks = 2 × 2, got 10"),
    ):
        with pytest.raises(ValueError, match=problem):
            built(**settings)
    dataset = make_dataset_config(lambda: [], {})  # noqa: PIE807
    with pytest.raises(TypeError, match="must return a midepoch Dataset, got list"):
        ResumableDataloaderConfig(dataset, global_batch_size=2).build(dp_rank=0, dp_world_size=2)


if __name__ == "__main__":
    main(sys.argv[1])
