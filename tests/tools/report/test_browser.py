"""The page in a real browser: it draws, its filters work, nothing is wrong in the console, light and dark, any width."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import midepoch
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
    with playwright.sync_playwright() as found:
        started = found.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=PATIENCE)
        yield started
        started.close()


class Page:
    """A page, and everything that went wrong in it."""

    def __init__(self, browser: Any, address: str, *, width: int = 1200, dark: bool = False) -> None:
        self.problems: list[str] = []
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self._context.set_default_timeout(PATIENCE)
        self.page = self._context.new_page()
        self.page.on("console", lambda said: self.problems.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda problem: self.problems.append(str(problem)))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.requests: list[str] = []
        self.page.goto(address)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def close(self) -> None:
        self.said = self.page.locator("body").inner_text()
        self._context.close()
        assert self.problems == []


@pytest.fixture
def address(run_folder: Path, labelled_files: str, tmp_path: Path) -> str:
    page = tmp_path / "report.html"
    page.write_text(render(collect(run_folder, midepoch.from_files(labelled_files), label="label")))
    return page.as_uri()


def test_it_draws_what_there_is(browser: Any, address: str) -> None:
    found = Page(browser, address)
    assert found.count("#consumption-svg rect.piece") == 3 and found.count("#consumption-svg rect.again") == 1
    assert found.count("#timeline-svg rect.pass") == 3
    assert found.count("#speed-svg .curve") == found.count("#waited-svg .curve") >= 3
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
    assert found.count("#timeline-svg rect.pass") == 2 and found.count("#consumption-svg rect.again") == 0
    curves = found.count("#speed-svg .curve")
    choose("[data-filter=rank]", "2")
    assert 1 <= found.count("#speed-svg .curve") < curves
    choose("[data-filter=epoch]", "1")
    assert found.count("#timeline-svg rect.pass") == 1 and found.page.locator("#epochs tr").count() == 2
    choose("[data-filter=start]", "all")
    choose("[data-filter=epoch]", "all")
    choose("[data-filter=rank]", "all")
    assert found.count("#timeline-svg rect.pass") == 3
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

    light, dark = Page(browser, address), Page(browser, address, dark=True)
    assert background(light) == "rgb(246, 247, 249)" and background(dark) == "rgb(13, 17, 23)"
    light.page.click("#theme")
    dark.page.click("#theme")
    assert background(light) == "rgb(13, 17, 23)" and background(dark) == "rgb(246, 247, 249)"
    assert light.count("#consumption-svg rect.piece") == 3
    light.close()
    dark.close()


def test_data_alone(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    (tmp_path / "data.html").write_text(render(collect(dataset=midepoch.from_files(labelled_files).shuffle(seed=1))))
    found = Page(browser, (tmp_path / "data.html").as_uri())
    assert found.count("#layout-svg rect") == 4 and found.count("#consumption") == 0
    assert "shuffled by window" in found.text("#shuffle")
    found.close()


def test_one_mark_and_very_many(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    list(midepoch.from_files(labelled_files).loader(100, audit=tmp_path / "run"))
    numbers = collect(tmp_path / "run")
    (tmp_path / "one.html").write_text(render(numbers))
    (run,) = numbers["runs"]
    assert len(run["speed"]) == 1 and len(run["speed"][0]["points"]) == 1
    run["speed"] = [
        {**run["speed"][0], "rank": rank, "points": [[1e9 + i, 5.0, 0.5, 1.0] for i in range(600)]}
        for rank in range(300)
    ]
    run["epochs"] = [{**run["epochs"][0], "epoch": epoch} for epoch in range(1000)]
    (tmp_path / "many.html").write_text(render(numbers))
    for name, drawn in (("one", 1), ("many", 300)):
        found = Page(browser, (tmp_path / f"{name}.html").as_uri())
        assert found.count("#speed-svg .curve") == drawn and found.count("#shuffle") == 1
        found.close()
        assert ("The last 60 of 1,000 epochs" in found.said) == (name == "many")


def test_a_run_in_progress(browser: Any, labelled_files: str, tmp_path: Path) -> None:
    loader = midepoch.from_files(labelled_files).loader(10, audit=Ledger(tmp_path / "run", attempt="1"))
    next(loader)
    next(loader)
    watch = Watch(lambda: collect(tmp_path / "run", read_checkpoints=False), "127.0.0.1", 0)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        found = Page(browser, watch.address)
        assert "live" in found.text("#made")
        assert found.page.locator(".tile", has_text="steps").locator("b").inner_text() == "2"
        for _ in range(40):
            next(loader)
        found.page.locator(".tile", has_text="steps").locator("b", has_text="42").wait_for()
        found.close()
    finally:
        watch.close()
        thread.join()
