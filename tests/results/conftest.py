"""Fixtures of pages in headless Chromium."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, of the extra dev, is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium; `make install` installs it for root, or apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a page; errors of its script and requests for anything but its file fail the test."""
    contexts, errors, requests = [], [], []

    def of(result: Any, *, width: int = 1280, theme: str = "light", **options: Any) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        result.to_html(path, **options)
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".ula-board[data-ready]")
        return page

    yield of
    for context in contexts:
        context.close()
    assert not errors
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
