"""What a report shows: of runs, of data, of checkpoints; as a page, and served."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import midepoch
from data import write_arrow
from midepoch.audit import Ledger
from midepoch.cli.app import app
from midepoch.errors import ColumnError, DataNotFoundError, StateError
from midepoch.tools.report import collect, render
from midepoch.tools.report.now import _MOST_RANKS
from midepoch.tools.report.watch import Watch, is_own


def call(*arguments: Any) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def test_a_run(run_folder: Path) -> None:
    found = collect(run_folder)
    (run,) = found["runs"]
    assert run["exact"] and run["world_sizes"] == [2, 3] and run["starts"] == 2 and run["steps"] == 20 + 24
    first, second = run["epochs"]
    assert (first["once"], first["again"], first["dropped"]) == (1000, 200, 0) and first["complete"]
    assert second["once"] == 4 * 30 and second["pending"] == 1000 - 120 - second["dropped"]
    pieces = [(piece["from"], piece["to"], piece["start"], piece["again"]) for piece in first["pieces"]]
    assert pieces == [(0, 400, 0, False), (400, 600, 0, True), (400, 1000, 1, False)]
    assert [(one["ranks"], one["epoch"], one["how"]) for one in run["passes"]] == [
        (2, 0, "fresh"),
        (3, 0, "loaded"),
        (3, 1, "on"),
    ]
    curves = {(one["start"], one["rank"]): one["points"] for one in run["speed"]}
    assert set(curves) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}  # one for each start and rank, not for each epoch
    assert all(point[1] > 0 and 0 <= point[2] <= 1 and point[5] is None for of in curves.values() for point in of)
    assert run["data"]["rows"] == 1000 and [file["rows"] for file in run["data"]["list"]] == [250] * 4
    assert run["shuffle"]["batch"] == 30 and run["shuffle"]["epoch"] == 1
    (step,) = found["checkpoints"]["steps"]
    assert step["step"] == 20 and step["problem"] is None and found["checkpoints"]["read"]


def test_what_is_wrong_shows(labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files)
    for number, position in enumerate([0, 300]):
        loader = ds.loader(50, audit=Ledger(tmp_path / "run", attempt=str(number)))
        loader.load_state_dict(
            {**loader.state_dict(), "position": position, "cursor": [[0, position]] if position else []}
        )
        next(loader)
        next(loader)
    (run,) = collect(tmp_path / "run")["runs"]
    assert not run["exact"] and run["epochs"][0]["never"] == 200 and 100 in run["epochs"][0]["examples"]
    PipelineCheckpoint = midepoch.PipelineCheckpoint(tmp_path / "run" / "checkpoints")
    PipelineCheckpoint.save(loader, step=1)
    PipelineCheckpoint.save(loader, step=2)
    (damaged,) = (tmp_path / "run" / "checkpoints").glob("*2/data*.json")
    damaged.write_text(damaged.read_text().replace("1", "2"))
    steps = collect(tmp_path / "run")["checkpoints"]["steps"]
    assert [one["problem"] is None for one in steps] == [True, False]


def test_many_ranks_are_shown_together(labelled_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)
    ranks, ds = _MOST_RANKS + 1, midepoch.from_files(labelled_files)
    for rank in range(ranks):
        ledger = Ledger(tmp_path / "run", attempt="1")
        loader = ds.loader(2, rank=rank, world_size=ranks, audit=ledger, last_batch="drop")
        for _ in range(4):
            next(loader)
    (run,) = collect(tmp_path / "run")["runs"]
    assert {one["rank"] for one in run["speed"]} == {-1} and run["exact"]


def test_batches_by_tokens(tmp_path: Path) -> None:
    lengths = [1 + 7 * i % 40 for i in range(200)]
    table = pa.table({"id": range(200), "input_ids": [[1] * length for length in lengths]})
    ds = midepoch.from_files(str(write_arrow(tmp_path / "a.arrow", table, 30))).shuffle(seed=2)
    for rank in range(2):
        ledger = Ledger(tmp_path / "run", attempt="a")
        loader = ds.loader(max_tokens=120, bucket_window=60, rank=rank, world_size=2, last_batch="uneven", audit=ledger)
        list(loader)
    found = collect(run=tmp_path / "run")["runs"][0]
    assert found["unit"] == "rows" and found["exact"] and found["epochs"][0]["once"] == 200
    assert found["shuffle"]["batch"] > 2  # rows of a step, not its two batches


def test_data(labelled_files: str) -> None:
    ds = midepoch.from_files(labelled_files).shuffle(seed=3, scope="window", window=4)
    found = collect(dataset=ds, label="label", batch_size=50)
    assert found["runs"] == [] and found["data"]["blocks"] == 40
    assert found["shuffle"]["window"] == 4 and found["shuffle"]["label"] == "label"
    assert found["shuffle"]["mine"]["imbalance"]["mean"] > found["shuffle"]["true"]["imbalance"]["mean"]
    with pytest.raises(ColumnError):
        collect(dataset=ds, label="nothing")
    with pytest.raises(ValueError, match="a run, a dataset, or both"):
        collect()
    with pytest.raises(ValueError, match="labels are in the data"):
        collect("run", label="label")


def test_a_run_of_a_slice_is_judged_by_its_own_labels(labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files)
    loader = ds.slice(500, 1000).shuffle(seed=1, scope="rows").loader(50, audit=tmp_path / "run")  # labels 2 and 3
    batches = [batch["label"].tolist() for batch in loader]
    (run,) = collect(tmp_path / "run", ds, label="label")["runs"]
    off = [abs(batch.count(2) / 50 - 0.5) for batch in batches]
    assert run["shuffle"]["mine"]["imbalance"]["values"] == pytest.approx(off, abs=1e-3)
    with pytest.raises(StateError, match="the data is not that of the run"):
        collect(tmp_path / "run", midepoch.from_files(str(tmp_path / "p0.parquet")))


def test_what_was_begun_anew_was_made_again(labelled_files: str, tmp_path: Path) -> None:
    for attempt in "12":
        loader = midepoch.from_files(labelled_files).loader(50, audit=Ledger(tmp_path / "run", attempt=attempt))
        for _ in range(6):
            next(loader)
    (run,) = collect(tmp_path / "run")["runs"]
    (epoch,) = run["epochs"]
    pieces = [(piece["from"], piece["to"], piece["start"], piece["again"]) for piece in epoch["pieces"]]
    assert epoch["again"] == 300 and sorted(pieces) == [(0, 300, 0, True), (0, 300, 1, False)]
    assert [one["kept"] for one in run["passes"]] == [False, True]


def test_several_loaders_have_each_their_own(labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files)
    for name, rows in (("train", 900), ("eval", 100)):
        list(ds.take(rows).loader(50, audit=Ledger(tmp_path / "run", name=name)))
    found = collect(tmp_path / "run")
    assert [(run["name"], run["data"]["rows"]) for run in found["runs"]] == [("train", 900), ("eval", 100)]


def test_runs_side_by_side(labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files)
    for name, rows in (("a", 300), ("b", 500)):
        list(ds.take(rows).loader(50, audit=tmp_path / name))
    folders = [tmp_path / "a", tmp_path / "b"]
    found = collect(folders)
    assert [(run["folder_path"], run["steps"]) for run in found["runs"]] == [
        (str(folders[0]), 6),
        (str(folders[1]), 10),
    ]
    told = json.loads(call("report", *folders, "--json").stdout)
    assert [run["data"]["rows"] for run in told["runs"]] == [300, 500]
    assert call("watch", *folders, tmp_path / "nothing").exit_code == 2


def test_many_files_are_drawn_together(labelled_files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.tools.report.page._MOST_FILES", 2)
    drawn = collect(dataset=midepoch.from_files(labelled_files))["data"]
    assert drawn["files"] == 4 and [one["rows"] for one in drawn["list"]] == [500, 500]


def test_names_of_files_cannot_end_the_script(tmp_path: Path) -> None:
    page = render({"title": "</script><script>alert(1)</script> /*live*/false", "runs": []})
    assert page.count("<script>") == 1 and page.count("</script>") == 1
    assert "const LIVE = false" in page and "const LIVE = true" in render({"title": "x"}, live=True)
    assert "http" not in page.split("</style>")[1].replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_command(run_folder: Path, labelled_files: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = call("report", run_folder, "-o", page)
    assert found.exit_code == 0 and "wrote" in found.output, found.output
    assert page.read_text().startswith("<!doctype html>")
    paths = sorted(tmp_path.glob("*.parquet"))
    told = json.loads(call("report", *paths, "--shuffle", 1, "--scope", "window", "--window", 2, "--json").stdout)
    assert told["shuffle"]["window"] == 2 and not told["runs"]
    told = json.loads(call("report", run_folder, "--data", labelled_files, "--label", "label", "--json").stdout)
    assert told["runs"][0]["data"]["blocks"] == 40 and told["runs"][0]["shuffle"]["label"] == "label"
    for wrong, why in (
        (["report", run_folder, "--shuffle", 1], "a run already has an order"),
        (["report", *paths, "--scope", "rows"], "--shuffle"),
        (["report", tmp_path / "nothing"], "nothing"),
        (["report", run_folder, "--stream", "other"], "no loader 'other'"),
        (["watch", tmp_path], "there is no ledger"),
    ):
        found = call(*wrong)
        assert found.exit_code == 2 and why in found.stderr, found.output


@pytest.mark.parametrize("below", ["", "ledger"])
def test_watch_waits_for_the_first_batch(
    labelled_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    folder = tmp_path / "run" / below
    (tmp_path / "run").mkdir()
    loader = midepoch.from_files(labelled_files).loader(50, audit=folder)
    if below:
        (tmp_path / "run" / "checkpoints").mkdir()
    waits, real = [], time.sleep

    def sleep(seconds: float) -> None:
        if seconds < 0.5:
            real(seconds)  # of threads that read
        else:
            waits.append(seconds)
            if len(waits) == 3:
                next(iter(loader))

    monkeypatch.setattr("midepoch.cli.runs.time.sleep", sleep)
    monkeypatch.setattr(Watch, "serve", lambda _: None)
    found = call("watch", tmp_path / "run", "--port", 0)
    assert found.exit_code == 0 and len(waits) == 3, found.output
    assert " ".join(found.stdout.split()).count("waiting for the first batch of ") == 1 and "http://" in found.stdout


@pytest.fixture
def served(run_folder: Path) -> Iterator[Watch]:
    watch = Watch(lambda: collect(run_folder, read_checkpoints=False), "127.0.0.1", 0)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    yield watch
    watch.close()
    thread.join()


def get(address: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()


def test_watch_serves_the_page_and_its_numbers(served: Watch) -> None:
    assert served.address == f"http://127.0.0.1:{served.port}/" and served.token is None
    status, page = get(served.address)
    assert status == 200 and b"const LIVE = true" in page
    status, numbers = get(served.address + "data.json")
    assert status == 200 and json.loads(numbers)["runs"][0]["steps"] == 44
    assert get(served.address + "etc/passwd")[0] == 404
    assert get(served.address, Host=f"localhost:{served.port}")[0] == 200
    assert get(served.address, Host="evil.example")[0] == 403  # another page, by a name that leads here


def test_watch_needs_a_token_elsewhere(run_folder: Path) -> None:
    watch = Watch(lambda: collect(run_folder), "0.0.0.0", 0)
    assert watch.token is not None and len(watch.token) >= 32 and watch.token in watch.address
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        here = f"http://127.0.0.1:{watch.port}/"
        assert get(here)[0] == get(here + "data.json")[0] == get(here + "?token=wrong")[0] == 403
        assert get(f"{here}data.json?token={watch.token}")[0] == 200
    finally:
        watch.close()
        thread.join()
    own = Watch(dict, "127.0.0.1", 0, token="mine")
    assert not own.admits("127.0.0.1", "") and own.admits("127.0.0.1", "mine")
    own.__exit__(None, None, None)


def test_watch_refuses_what_is_no_name() -> None:
    watch = Watch(dict, "::1", 0)
    assert watch.address == f"http://[::1]:{watch.port}/"
    assert watch.admits("[::1]:80", "") and not watch.admits("[", "") and not watch.admits(None, "")
    watch.__exit__(None, None, None)


def test_watch_tells_of_a_run_that_cannot_be_read() -> None:
    def look() -> dict[str, Any]:
        raise DataNotFoundError("it is gone.")

    watch = Watch(look, "127.0.0.1", 0)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        assert get(watch.address) == (503, b"it is gone.\n")
    finally:
        watch.close()
        thread.join()


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.9.1", True),
                                           ("0.0.0.0", False), ("10.0.0.1", False), ("example.org", False), ("", False)])  # fmt: skip
def test_own_addresses(host: str, own: bool) -> None:
    assert is_own(host) is own


def test_exclusions_leases_phases_and_weights_show(labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files).shuffle(seed=1)
    loader = ds.loader(10, audit=tmp_path / "excluded")
    next(loader)
    loader.exclude(steps=range(2, 5))
    next(loader)
    assert collect(tmp_path / "excluded")["runs"][0]["epochs"][0]["excluded"] == 30

    loader = ds.loader(10, audit=tmp_path / "leased")
    with loader.lease() as items:
        leases = [next(items) for _ in range(5)]
        leases[1].ack(), leases[3].reject()
        loader.state_dict()
    counts = {"leased": 50, "acknowledged": 20, "rejected": 10, "out": 0, "returned": 30}
    assert collect(tmp_path / "leased")["runs"][0]["epochs"][0]["leases"] == counts

    phases = [
        midepoch.Phase("warm-up", {"a": 1}, steps=2, global_batch_size=10),
        midepoch.Phase("main", {"a": 0.5, "b": 0.5}, steps=6),
        midepoch.Phase("anneal", {"b": 1}, steps=2),
    ]
    loader = midepoch.mix({"a": ds, "b": ds}, midepoch.Schedule(phases), seed=1).loader(audit=tmp_path / "phases")
    seen = []
    for step in range(10):
        if step == 5:
            loader.set_weights({"a": 0.2, "b": 0.8})
        next(loader)
        (run,) = collect(tmp_path / "phases")["runs"]
        weights = [one["weight"] for one in run["now"]["sources"]]
        seen.append((run["now"]["phase"], weights, run["now"]["progress"]))
    assert seen[0] == ("warm-up", [1.0, 0.0], 0.1) and seen[3] == ("main", [0.5, 0.5], 0.4)
    assert seen[6] == ("main", [0.2, 0.8], 0.7) and seen[8] == ("anneal", [0.0, 1.0], 0.9)
    assert [(one["step"], one["phase"]) for one in run["weight_changes"]] == [(6, "main")]
