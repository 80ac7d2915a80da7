"""What is said of how well an order mixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.order import Order, Selection, Shuffle, SourceLayout
from midepoch.tools.report.page import quality


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
    assert [correlation for _, correlation, _ in found["mine"]["serial"]] == pytest.approx([1.0] * 9)
    assert found["mine"]["imbalance"]["mean"] == pytest.approx(0.75)  # each batch is of one file of four
    assert abs(found["true"]["serial"][0][1]) < 2 * found["noise"]
    assert found["true"]["imbalance"]["mean"] < 0.2
    assert found["classes"] == "file"


def test_shuffled_by_rows_is_a_true_permutation(labelled_files: str) -> None:
    found = judged(labelled_files, 7, "rows")
    assert found["mine"] == found["true"] and found["scope"] == "rows"


def test_a_small_window_mixes_less_than_a_large_one(labelled_files: str) -> None:
    small, large = judged(labelled_files, 7, "window", 2), judged(labelled_files, 7, "window", 40)
    assert small["window"] == 2
    for name, of in (("serial", lambda one: one[0][1]), ("imbalance", lambda one: one["mean"])):
        assert of(small["mine"][name]) > 2 * of(large["mine"][name]), name


def test_by_label(labelled_files: str) -> None:
    found = judged(labelled_files, label="label")
    assert found["classes"] == "label" and found["mine"]["imbalance"]["mean"] == pytest.approx(0.75)


def test_labels_that_alternate() -> None:
    order, layout = (
        Order(Selection.of_ranges([(0, 32_768)]), Shuffle(1, "rows")),
        SourceLayout(*[np.array([0, 32_768])] * 2),
    )
    found = quality(order, layout, 0, batch=256, labels=lambda rows: (rows % 2).tolist())
    assert found["mine"]["imbalance"]["mean"] < 0.1


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_few_rows(labelled_files: str, rows: int) -> None:
    ds = midepoch.from_files(labelled_files).take(rows).shuffle(seed=1)
    found = quality(ds.pipeline.order, ds.pipeline.source.layout, 3, batch=256)
    assert sum(found["mine"]["picture"]) == rows and found["epoch"] == 3


SCOPES = [None, (7, "rows"), (7, "window", 1), (7, "window", 5), (7, "files")]


@pytest.mark.parametrize("shuffle", SCOPES)
@pytest.mark.parametrize("rows", [3, 50, 1000])
def test_serial_correlation_is_the_coefficient_of_all_pairs(labelled_files: str, shuffle: Any, rows: int) -> None:
    ds = midepoch.from_files(labelled_files).take(rows)
    ds = ds.shuffle(*shuffle) if shuffle else ds
    order = ds.pipeline.order.at(0, ds.pipeline.source.layout).chosen(np.arange(rows))
    found = quality(ds.pipeline.order, ds.pipeline.source.layout, 0, batch=10)
    assert found["spans"] is None and (rows < 4 or found["mine"]["serial"])
    for lag, correlation, pairs in found["mine"]["serial"]:
        assert pairs == rows - lag and -1 <= correlation <= 1
        assert correlation == pytest.approx(np.corrcoef(order[:-lag], order[lag:])[0, 1])


def test_serial_correlation_of_large_data_in_order_is_one() -> None:
    order, layout = Order(Selection.of_ranges([(0, 10**7)])), SourceLayout(*[np.array([0, 10**7])] * 2)
    found = quality(order, layout, 0, batch=256)
    assert [one[1] for one in found["mine"]["serial"]] == pytest.approx([1.0] * 11)
    assert found["spans"] == [8, 4096] and found["mine"]["serial"][0][2] == 8 * 4095
    assert all(abs(one[1]) < 3 * found["noise"] for one in found["true"]["serial"])
