"""The page in a real browser: it draws, its filters work, nothing is wrong in the console, light and dark, any width."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from forks import forked
from midepoch.audit import Ledger
from midepoch.tools.report import collect, render
from midepoch.tools.report.watch import Watch

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

PATIENCE = 180_000
"""Milliseconds: it starts while other tests have the machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One tab for all tests: a new one costs a process, and a second of a core."""
    with playwright.sync_playwright() as found:
        started = found.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=PATIENCE)
        tab = started.new_page()
        tab.set_default_timeout(PATIENCE)
        yield tab
        started.close()


class Page:
    """A page, and everything that went wrong in it."""

    def __init__(self, tab: Any, address: str, *, width: int = 1200, dark: bool = False) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page = tab
        tab.goto("about:blank")
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme="dark" if dark else "light")
        self._listeners = {
            "console": lambda said: self.problems.append(said.text) if said.type != "log" else None,
            "pageerror": lambda problem: self.problems.append(str(problem)),
            "request": lambda asked: self.requests.append(asked.url),
        }
        for event, listener in self._listeners.items():
            tab.on(event, listener)
        tab.goto(address)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def close(self) -> None:
        self.said = self.page.locator("body").inner_text()
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        assert self.problems == []


@pytest.fixture
def address(run_folder: Path, labelled_files: str, tmp_path: Path) -> str:
    page = tmp_path / "report.html"
    page.write_text(render(collect(run_folder, midepoch.from_files(labelled_files), label="label")))
    return page.as_uri()


def test_it_draws_what_there_is(browser: Any, address: str) -> None:
    found = Page(browser, address)
    assert found.count("#consumption-svg rect.piece") == 3 and found.count("#consumption-svg rect.again") == 1
    assert found.count("#timeline-svg rect.start") == 2 and found.count("#timeline-svg line.epoch") == 1
    assert found.count("#speed-svg .curve") == found.count("#waited-svg .curve") == 5
    assert found.count("#layout-svg rect") == 4 and found.count("#serial-svg .curve") == 2
    assert "exact" in found.text("#overview") and "2 → 3" in found.text("#overview")
    assert "complete" in found.text("#epochs") and "complete" in found.text("#checkpoints")
    drawn = found.page.evaluate(
        "() => ['mine', 'true'].map(k => { const c = document.getElementById('order-' + k);"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v > 0).length })"
    )
    assert all(cells > 500 for cells in drawn)
    assert found.requests == [address]  # it needs nothing else
    found.close()


def test_filters(browser: Any, address: str) -> None:
    found = Page(browser, address)
    choose = found.page.select_option
    choose("[data-filter=start]", "2")
    assert found.count("#timeline-svg rect.start") == 1 and found.count("#consumption-svg rect.again") == 0
    curves = found.count("#speed-svg .curve")
    choose("[data-filter=rank]", "2")
    assert 1 <= found.count("#speed-svg .curve") < curves
    choose("[data-filter=epoch]", "1")
    assert (
        found.count("#timeline-svg rect.start") == 1
        and found.count("#timeline-svg line.epoch") == 0
        and found.page.locator("#epochs tr").count() == 2
    )
    choose("[data-filter=start]", "all")
    choose("[data-filter=epoch]", "all")
    choose("[data-filter=rank]", "all")
    assert found.count("#timeline-svg rect.start") == 2
    found.close()


@pytest.mark.parametrize("width", [340, 800, 1600])
def test_any_width(browser: Any, address: str, width: int) -> None:
    found = Page(browser, address, width=width)
    assert found.page.evaluate("document.scrollingElement.scrollWidth") <= width
    box = found.page.locator("#consumption-svg").bounding_box()
    assert 250 < box["width"] <= width
    found.close()


def test_light_and_dark(browser: Any, address: str) -> None:
    def background(page: Page) -> str:
        return page.page.evaluate("getComputedStyle(document.body).backgroundColor")

    colours = {False: "rgb(246, 247, 249)", True: "rgb(13, 17, 23)"}
    for dark in (False, True):
        found = Page(browser, address, dark=dark)
        assert background(found) == colours[dark]
        found.page.click("#theme")
        assert background(found) == colours[not dark]
        assert found.count("#consumption-svg rect.piece") == 3
        found.close()


def test_data_alone(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    (tmp_path / "data.html").write_text(render(collect(dataset=midepoch.from_files(labelled_files).shuffle(seed=1))))
    found = Page(browser, (tmp_path / "data.html").as_uri())
    assert found.count("#layout-svg rect") == 4 and found.count("#consumption") == 0
    assert "shuffled by window" in found.text("#shuffle")
    assert re.search(r"On average [\d.]+\xa0%, of", found.text("#shuffle"))  # no line begins with the sign
    found.close()


def test_one_mark_and_very_many(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    list(midepoch.from_files(labelled_files).loader(100, audit=tmp_path / "run"))
    numbers = collect(tmp_path / "run")
    (tmp_path / "one.html").write_text(render(numbers))
    (run,) = numbers["runs"]
    assert len(run["speed"]) == 1 and len(run["speed"][0]["points"]) == 1
    run["speed"] = [
        {**run["speed"][0], "rank": rank, "points": [[1e9 + i, 5.0, 0.5, 1.0, 0, None] for i in range(600)]}
        for rank in range(300)
    ]
    run["epochs"] = [{**run["epochs"][0], "epoch": epoch} for epoch in range(1000)]
    (tmp_path / "many.html").write_text(render(numbers))
    for name, drawn in (("one", 1), ("many", 300)):
        found = Page(browser, (tmp_path / f"{name}.html").as_uri())
        assert found.count("#speed-svg .curve") == drawn and found.count("#shuffle") == 1
        found.close()
        assert ("The last 60 of 1,000 epochs" in found.said) == (name == "many")


def colours(page: Page, selector: str) -> set[str]:
    return set(page.page.eval_on_selector_all(selector, "found => found.map(one => one.getAttribute('fill'))"))


def test_red_means_lost_or_repeated(browser: Any, address: str, labelled_files: str, tmp_path: Path) -> None:
    good = Page(browser, address)
    starts = colours(good, "#timeline-svg rect.start")
    assert len(starts) == 2 and starts == colours(good, "#consumption-svg rect.piece")
    assert all(int(one[1:3], 16) < 240 or int(one[3:5], 16) > 100 for one in starts)  # none is a red
    assert good.count(".bad") == good.count("g.wrong") == 0
    assert {"start 1", "start 2", "delivered, and again after a resume", "to come, or dropped"} == set(
        good.page.locator("#consumption .legend span").all_inner_texts()
    )
    good.close()
    ds = midepoch.from_files(labelled_files)
    for number, position in enumerate([0, 300]):
        loader = ds.loader(50, audit=Ledger(tmp_path / "bad", attempt=str(number)))
        loader.load_state_dict(
            {**loader.state_dict(), "position": position, "cursor": [[0, position]] if position else []}
        )
        next(loader)
        next(loader)
    (tmp_path / "bad.html").write_text(render(collect(tmp_path / "bad")))
    bad = Page(browser, (tmp_path / "bad.html").as_uri())
    assert bad.count("#consumption-svg g.wrong") > 0 and "✕ not exact" in bad.text("#overview")
    assert "lost or repeated" in bad.text("#consumption .legend")
    bad.close()


def test_one_of_each_is_singular(browser: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "one.parquet")
    ds = midepoch.from_files(tmp_path / "one.parquet")
    list(ds.loader(1, audit=tmp_path / "run"))
    (tmp_path / "run.html").write_text(render(collect(tmp_path / "run", ds)))
    found = Page(browser, (tmp_path / "run.html").as_uri())
    found.close()
    assert "1 file, 1 block, 1 row," in found.said
    assert not re.search(r"\b1\s+(files|blocks|rows|ranks|steps|starts|workers|epochs)\b", found.said), found.said


def test_a_mix_with_tokens(
    browser: Any, docs: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)
    tokens = docs.rename_columns({"tokens": "input_ids"}).select_columns(["input_ids"])
    mixed = midepoch.mix({"web": tokens.shuffle(seed=1), "code": tokens.shuffle(seed=2)}, {"web": 3, "code": 1})
    loader = mixed.pack(16, strategy="best_fit", window=16).loader(4, audit=tmp_path / "run")
    for _ in range(20):
        next(loader)
    (tmp_path / "mix.html").write_text(render(collect(tmp_path / "run")))
    for width in (390, 1280):
        found = Page(browser, (tmp_path / "mix.html").as_uri(), width=width)
        assert found.page.evaluate("document.scrollingElement.scrollWidth") <= width
        rows = found.page.locator("#source-table tr").all_inner_texts()
        assert [row.split()[0] for row in rows[1:]] == ["web", "code"] and "75.0 %" in rows[1]
        assert found.count("#sources-svg rect.source") == 2 and found.count("#tokens-svg .curve") == 1
        assert "packing efficiency" in found.text("#now") and "tokens/s now" in found.text("#now")
        assert "left" in found.text("#progress") and found.count("#shuffle") == 0
        found.close()


def test_runs_side_by_side(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    for name, rows in (("a", 300), ("b", 500)):
        list(midepoch.from_files(labelled_files).take(rows).loader(50, audit=tmp_path / name))
    (tmp_path / "two.html").write_text(render(collect([tmp_path / "a", tmp_path / "b"])))
    found = Page(browser, (tmp_path / "two.html").as_uri())
    assert found.page.locator("#side-by-side tr").count() == 3
    assert found.page.locator("#overview .tile", has_text="steps").locator("b").inner_text() == "6"
    found.page.locator("#side-by-side button").nth(1).click()
    assert found.page.locator("#overview .tile", has_text="steps").locator("b").inner_text() == "10"
    found.close()


def test_a_killed_run_is_shown_as_stopped(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    def train() -> None:
        loader = midepoch.from_files(labelled_files).loader(10, audit=tmp_path / "run")
        for _ in range(5):
            next(loader)
        os.kill(os.getpid(), signal.SIGKILL)

    forked(train)
    watch = Watch(lambda: collect(tmp_path / "run", read_checkpoints=False), "127.0.0.1", 0)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        found = Page(browser, watch.address)
        assert re.search(r"■ stopped · last step \d+ s ago", found.text("#state"))
        assert found.count("#overview .good") == 0 and "exact up to the last step" in found.text("#overview")
        assert "When it stopped" in found.text("#now")
        found.close()
        assert not re.search(r"\b(live|running)\b", found.said)
    finally:
        watch.close()
        thread.join()


def test_a_run_in_progress(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    loader = midepoch.from_files(labelled_files).loader(10, audit=Ledger(tmp_path / "run", attempt="1"))
    next(loader)
    next(loader)
    watch = Watch(lambda: collect(tmp_path / "run", read_checkpoints=False), "127.0.0.1", 0)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        found = Page(browser, watch.address)
        assert "running" in found.text("#state") and "updated" in found.text("#made")
        assert found.page.locator(".tile", has_text="steps").locator("b").inner_text() == "2"
        for _ in range(40):
            next(loader)
        found.page.locator(".tile", has_text="steps").locator("b", has_text="42").wait_for()
        found.close()
    finally:
        watch.close()
        thread.join()


def test_phases_weights_exclusions_and_leases(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(labelled_files)
    schedule = midepoch.Schedule([midepoch.Phase("main", {"a": 0.5, "b": 0.5}, steps=20, global_batch_size=10)])
    mixed = midepoch.mix({"a": ds, "b": ds}, schedule, seed=1).loader(audit=tmp_path / "mix")
    next(mixed)
    mixed.set_weights({"a": 0.2, "b": 0.8})
    next(mixed)
    rows = ds.loader(10, audit=tmp_path / "rows")
    rows.exclude(steps=range(2, 5))
    next(rows)
    with ds.loader(10, audit=tmp_path / "leases").lease() as items:
        next(items).ack()
    wanted = {
        "mix": {"#now": ["main"], "#sources": ["Weights set during the run: a 20"]},
        "rows": {"#epochs": ["excluded", "30"]},
        "leases": {"#epochs": ["acknowledged", "still out"]},
    }
    for name, places in wanted.items():
        path = tmp_path / f"{name}.html"
        path.write_text(render(collect(tmp_path / name)))
        page = Page(browser, path.as_uri(), width=340)
        assert all(text in page.text(place) for place, texts in places.items() for text in texts)
        assert ("leased" in page.text("#progress")) == (name == "leases") == ("was leased" in page.text("#consumption"))
        assert ("What was left out on the way has no mark" in page.text("#consumption")) == (name == "rows")
        assert page.page.evaluate("document.scrollingElement.scrollWidth") <= 340
        page.close()


def test_a_packed_run_says_what_it_counts_and_fits_any_screen(browser: Any, tmp_path: Path) -> None:
    """Batches have sequences, the end of the epoch is not known, and no row of tiles has a single one."""
    tokens = [list(range(1 + n % 50)) for n in range(900)]
    ds = midepoch.from_dict({"input_ids": tokens}).filter(lambda row: len(row["input_ids"]) > 1).pack(64)
    for number, _ in enumerate(ds.loader(2, audit=tmp_path / "run")):
        if number == 30:
            break
    found = collect(tmp_path / "run")
    # The figures of a run of more than a second.
    found["runs"][0]["now"] |= {"rows_per_second": 800.0, "tokens_per_second": 51_200.0, "waited": 0.1, "packing": 0.99}
    page = tmp_path / "report.html"
    page.write_text(render(found))
    for width in (1280, 390):
        shown = Page(browser, page.as_uri(), width=width)
        now, consumed = shown.text("#now"), shown.text("#consumption").replace("not known before its end", "")
        assert "sequences/s" in now and "sequences in a global batch" in now and "rows/s" not in now
        assert ("not known before its end" in now) == ("end of the epoch" not in consumed)
        wide = "e => e.scrollWidth > e.clientWidth"
        assert not shown.page.evaluate(
            f"[document.documentElement, ...document.querySelectorAll('.scroll')].some({wide})"
        )
        lefts = shown.page.evaluate(
            "[...document.querySelectorAll('#now .tiles')].map(all => [...all.children].map(one => one.offsetTop))"
        )
        rows = [tops.count(top) for tops in lefts for top in set(tops)]
        assert width == 390 or min(rows) > 1
        shown.close()


def test_no_page_contradicts_itself_or_is_cut_off(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    """A packed mix with a schedule and exclusions, and a finished run of two ranks: alone and side by side."""
    tokens = midepoch.from_dict({"input_ids": [list(range(1 + n % 50)) for n in range(300)]})
    phases = [midepoch.Phase("only", {"a": 0.5, "b": 0.5}, steps=30, sequence_length=64, global_batch_size=4)]
    mixed = midepoch.mix({"a": tokens, "b": tokens.take(40)}, midepoch.Schedule(phases), seed=1)
    packed = mixed.pack(pad=0).loader(audit=tmp_path / "a-packed-mix-with-a-schedule", provenance=True)
    next(packed)
    packed.exclude(steps=range(3, 5))
    list(packed)
    ds = midepoch.from_files(labelled_files)
    for rank in range(2):
        ledger = Ledger(tmp_path / "rows", attempt="1")
        list(ds.loader(7, rank=rank, world_size=2, last_batch="drop", audit=ledger))
    runs = [tmp_path / "a-packed-mix-with-a-schedule", tmp_path / "rows"]
    for name, folders in (("mix", runs[:1]), ("rows", runs[1:]), ("both", runs)):
        contents = collect(folders)
        for run in contents["runs"]:
            (epoch,) = run["epochs"]
            assert epoch["once"] + epoch["dropped"] + epoch["excluded"] == epoch["rows"] and epoch["dropped"]
            # The figures of a run of more than a second, by processes that are gone.
            of_all = [{**rank, "state": "stopped"} for rank in run["now"]["by_rank"]]
            run["now"] |= {"rows_per_second": 8e5, "waited": 0.1, "state": "finished", "by_rank": of_all}
        (tmp_path / f"{name}.html").write_text(render(contents))
        for width in (1280, 390):
            page = Page(browser, (tmp_path / f"{name}.html").as_uri(), width=width)
            wide = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerHTML)"
            assert page.page.eval_on_selector_all(".scroll, html", wide) == []
            assert "no row is lost or repeated" in page.text("#overview") and "every row" not in page.text("#overview")
            assert "to come, or dropped" in page.text("#consumption .legend")
            if name == "mix":
                assert "does not call such rows repeated" in page.text("#sources") and "phase" in page.text("#sources")
                assert "outputs excluded" in page.text("#epochs")
                drawn = page.text("#consumption")  # the schedule is complete, and not all rows are drawn
                assert "all rows of its sources" in drawn and "end of the epoch" not in drawn
            elif name == "rows":
                assert "stopped" not in page.text("#ranks")
            else:
                assert "800,000 sequences" in page.text("#runs") and "rows or sequences per second" in page.text(
                    "#runs"
                )
            page.close()


def test_a_run_of_which_one_rank_stopped(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    """It says so, and on a wide screen each rank has one line; on a narrow one, numbers keep their signs."""
    ds = midepoch.from_files(labelled_files)
    for rank in range(2):
        list(ds.loader(10, rank=rank, world_size=2, audit=Ledger(tmp_path / "run", attempt="1")))
    contents = collect(tmp_path / "run")
    now = contents["runs"][0]["now"]
    now |= {"state": "stopped", "by_rank": [{**one, "rows_per_second": 8.0, "waited": 0.1} for one in now["by_rank"]]}
    now["by_rank"] = [
        {**one, "state": state} for one, state in zip(now["by_rank"], ("running", "stopped"), strict=True)
    ]
    path = tmp_path / "report.html"
    path.write_text(render(contents))
    page = Page(browser, path.as_uri(), width=1280)
    assert "1 of 2 ranks stopped" in page.text("#state")
    states = page.page.locator("#rank-table td:nth-child(2)").all_inner_texts()
    assert states == ["● running", "■ stopped"]
    heights = page.page.eval_on_selector_all("#rank-table tr", "all => all.map(one => one.offsetHeight)")
    assert max(heights) < 40
    page.close()


def test_on_a_narrow_screen_numbers_stay_on_a_line_and_nothing_is_empty(browser: Any, tmp_path: Path) -> None:
    tokens = midepoch.from_dict({"input_ids": [list(range(1 + n % 50)) for n in range(300)]})
    names = ["a-source-of-text-with-a-name-that-is-long", "another-one-of-code"]
    mixed = midepoch.mix(dict.fromkeys(names, tokens), {names[0]: 0.75, names[1]: 0.25}, seed=1)
    list(mixed.pack(64, pad=0).loader(4, audit=tmp_path / "mix"))
    path = tmp_path / "report.html"
    path.write_text(render(collect([tmp_path / "mix", tmp_path / "mix"])))
    page = Page(browser, path.as_uri(), width=390)
    lines = "all => all.map(one => { const r = document.createRange(); r.selectNodeContents(one); return r.getClientRects().length; })"
    assert set(page.page.eval_on_selector_all("#source-table td:not(:first-child)", lines)) == {1}
    assert "" not in page.page.locator("table.card td").all_inner_texts()
    page.close()
