"""What is said of how well an order mixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.order import Layout, Order, Selection, Shuffle
from midepoch.tools.report.quality import quality


def judged(labelled_files: str, *shuffle: Any, label: str | None = None) -> dict[str, Any]:
    ds = midepoch.from_files(labelled_files)
    ds = ds.shuffle(*shuffle) if shuffle else ds
    labels = (lambda rows: (rows // 250).tolist()) if label else None
    return quality(ds.pipeline.order, ds.pipeline.source.layout, 0, batch=50, labels=labels)


def test_in_order_is_told_from_a_permutation(labelled_files: str) -> None:
    found = judged(labelled_files)
    cells = found["cells"]
    picture = np.array(found["mine"]["picture"]).reshape(cells, cells)
    assert picture.sum() == 1000 and (picture > 0).sum() <= 2 * cells  # a diagonal
    assert picture[0, 0] > 0 and picture[-1, -1] > 0 and picture[0, -1] == 0
    assert dict(found["mine"]["serial"])[1] == pytest.approx(1.0, abs=0.01)
    assert found["mine"]["imbalance"]["mean"] == pytest.approx(0.75)  # each batch is of one file of four
    assert abs(dict(found["true"]["serial"])[1]) < 2 * found["noise"]
    assert found["true"]["imbalance"]["mean"] < 0.2
    assert found["classes"] == "file"


def test_shuffled_by_rows_is_a_true_permutation(labelled_files: str) -> None:
    found = judged(labelled_files, 7, "rows")
    assert found["mine"] == found["true"] and found["scope"] == "rows"


def test_a_small_window_mixes_less_than_a_large_one(labelled_files: str) -> None:
    small, large = judged(labelled_files, 7, "window", 2), judged(labelled_files, 7, "window", 40)
    assert small["window"] == 2
    for name, of in (("serial", lambda one: dict(one)[1]), ("imbalance", lambda one: one["mean"])):
        assert of(small["mine"][name]) > 2 * of(large["mine"][name]), name


def test_by_label(labelled_files: str) -> None:
    found = judged(labelled_files, label="label")
    assert found["classes"] == "label" and found["mine"]["imbalance"]["mean"] == pytest.approx(0.75)


def test_labels_that_alternate() -> None:
    order, layout = Order(Selection.of_ranges([(0, 32_768)]), Shuffle(1, "rows")), Layout(*[np.array([0, 32_768])] * 2)
    found = quality(order, layout, 0, batch=256, labels=lambda rows: (rows % 2).tolist())
    assert found["mine"]["imbalance"]["mean"] < 0.1


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_few_rows(labelled_files: str, rows: int) -> None:
    ds = midepoch.from_files(labelled_files).take(rows).shuffle(seed=1)
    found = quality(ds.pipeline.order, ds.pipeline.source.layout, 3, batch=256)
    assert sum(found["mine"]["picture"]) == rows and found["epoch"] == 3
