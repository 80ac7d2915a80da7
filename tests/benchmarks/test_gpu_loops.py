"""benchmarks/gpu.py: every part runs without a GPU, and both loaders do the same work."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmark_runs import run

pytest.importorskip("torch")
pytest.importorskip("PIL")


SAME_WORK = """
import json, tempfile
from itertools import islice
from pathlib import Path
from benchmarks.feeding import files, routes
from benchmarks.feeding.work import Scale

scale = Scale().smoke
with tempfile.TemporaryDirectory() as folder:
    made = files.make(Path(folder), scale, routes.LOOPS)
    found = {}
    for loop in routes.LOOPS:
        for make in (routes.ours, routes.torchs):
            batches = list(islice(make(loop, made, scale, 0), 60))
            found[f"{loop} {make.__name__}"] = {
                "columns": sorted((name, list(value.shape), str(value.dtype)) for name, value in batches[0].items()),
                "largest": max(int(value.max()) for batch in batches for value in batch.values()),
                "rows": [
                    {name: batch[name][row].tolist() for name in batch}
                    for batch in batches if loop == "text" for row in range(scale.sequences)
                ],
            }
print(json.dumps(found))
"""


# That of images has measurements of its own. The routes of all three are compared below.
@pytest.mark.parametrize("loops", [["images"], pytest.param(["tokens", "text", "images"], marks=pytest.mark.slow)])
def test_all_loops_run_on_a_cpu(loops: list[str], tmp_path: Path, python: str) -> None:
    words = ["--smoke", "--device", "--loops", ",".join(loops), "--json", str(tmp_path / "figures.json")]
    output = run(python, "-m", "benchmarks.gpu", *words)
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert set(figures) == set(loops)
    for kinds in figures.values():
        assert set(kinds["training"]) == {"synthetic", "midepoch", "DataLoader"}
        assert set(kinds["loader alone"]) == set(kinds["first batch, 0 workers"]) == {"midepoch", "DataLoader"}
        for contenders in (kinds["training"], kinds["loader alone"]):
            for (figure,) in contenders.values():
                assert figure["rows_per_second"] > 0
                assert 0 <= figure["next_share"] <= 1
    assert output.count("share of the synthetic rate") >= 2 * len(loops), "medians and bars of every loop"


def test_both_loaders_do_the_same_work(python: str) -> None:
    found = json.loads(run(python, "-c", SAME_WORK))
    for loop in ("tokens", "text", "images"):
        ours, torchs = found[f"{loop} ours"], found[f"{loop} torchs"]
        assert ours["columns"] == torchs["columns"]
        assert torchs["largest"] < 32_768
    for which in ("text ours", "text torchs"):
        ends = 0
        for row in found[which]["rows"]:
            segments = row["segment_ids"]
            assert segments[0] == 1, "every sequence is full, and counts its documents"
            following = zip(row["input_ids"][:-1], row["position_ids"][1:], pairwise(segments), strict=True)
            for token, position, (segment, next_segment) in following:
                assert (token == 0) == (position == 0) == (next_segment == segment + 1), "documents end with eos"
                ends += token == 0
        assert ends > 5
