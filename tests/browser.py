"""A real headless browser at Prefect's pages. Needs Chromium or Chrome: installed here where that may be done."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Locator, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = ("apt-get", "install", "--yes", "--no-install-recommends", "chromium")
WAIT_MS = 90_000
"""What a page may take on a busy machine: two cores serve Prefect, the batch and the browser."""


def _browser() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def chromium() -> str:
    """The path of a browser, installed from Debian's or Ubuntu's packages where it is missing and root asks."""
    if (found := _browser()) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "--quiet"], capture_output=True, timeout=300)
        subprocess.run(INSTALL, capture_output=True, timeout=600)
        found = _browser()
    if found is None:
        pytest.fail(f"no browser: one of {', '.join(PROGRAMS)} is needed (as root: {' '.join(INSTALL)})", pytrace=False)
    return found


@contextmanager
def open_page() -> Iterator[Page]:
    """An empty page; the browser ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.set_default_timeout(WAIT_MS)
            yield page
        finally:
            browser.close()


def form_field(page: Page, name: str) -> Locator:
    """The box of one parameter in the form of a custom run."""
    label = page.locator(".schema-form-property__label", has_text=re.compile(rf"^{name}( \(Optional\))?$"))
    return page.locator(".schema-form-property").filter(has=label).last.locator("input, textarea").first


def open_form(page: Page, ui: str, deployment: str) -> None:
    """From the list of deployments to the form of a custom run, by the clicks that a person makes."""
    page.goto(f"{ui}/deployments")
    page.get_by_role("link", name=deployment, exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    form_field(page, "n_samples_per_prompt").wait_for()


def open_artifact(page: Page, run_url: str, key: str) -> None:
    """The page of a flow run's artifact, by its card."""
    end = time.monotonic() + WAIT_MS / 1000
    card = page.locator("a[href*='/artifacts/artifact/']").filter(has=page.get_by_text(key, exact=True))
    while not card.count():
        assert time.monotonic() < end, f"{run_url} shows no artifact {key}"
        page.goto(run_url)
        page.get_by_text("Artifacts", exact=True).click()
        page.mouse.move(700, 700)
        page.mouse.wheel(0, 5000)  # cards of tasks are fetched when they come into sight
        page.wait_for_timeout(2000)
    card.first.click()
    page.wait_for_url("**/artifacts/**")
