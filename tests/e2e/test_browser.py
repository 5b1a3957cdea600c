"""What a person does and sees in Prefect's pages: the form of a batch, its progress, its artifacts. A real browser.

`ROLLOUT_SCREENSHOTS=infra/pages` writes the README's pictures anew.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import form_field, open_artifact, open_form, open_page
from command import Rollout
from playwright.sync_api import Page
from running_up import Up, running_up

pytestmark = [pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def up(rollout_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`rollout up` as a person starts it."""
    with running_up(Rollout(home=rollout_home, cwd=tmp_path_factory.mktemp("up"))) as running:
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_page() as page:
        yield page


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("ROLLOUT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_form_refuses_a_value_out_of_bounds_and_says_which(up: Up, page: Page):
    open_form(page, up.ui, "rollout-batch")
    for name, value, reason in (
        ("n_samples_per_prompt", "0", "0 is less than the minimum of 1"),
        ("parity_min_equal", "1.5", "1.5 is greater than the maximum of 1"),
    ):
        default = form_field(page, name).input_value()
        form_field(page, name).fill(value)
        page.get_by_role("button", name="Submit").click()
        page.get_by_text(re.compile(rf"'{name}'.*{re.escape(reason)}")).first.wait_for()
        form_field(page, name).fill(default)


def test_a_batch_is_started_followed_and_read(up: Up, page: Page, prompt_file: Path):
    given = {"prompts": prompt_file, "n_samples_per_prompt": 6, "concurrency": 2, "shard_size": 6}
    open_form(page, up.ui, "rollout-batch")
    for name, value in given.items():
        form_field(page, name).fill(str(value))
    form_field(page, "n_samples_per_prompt").scroll_into_view_if_needed()
    picture(page, "form")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("scheduled to start").first.wait_for()
    (started,) = up.call("POST", "/flow_runs/filter", {"limit": 1, "sort": "START_TIME_DESC"})
    run = f"{up.ui}/runs/flow-run/{started['id']}"

    shares = follow_progress(page, run)
    assert shares == sorted(shares) and 100 == shares[-1]
    assert len({*shares} - {0, 100}) > 1, f"the progress artifact did not move: {shares}"

    page.goto(run)
    page.get_by_text("Completed", exact=True).first.wait_for()
    picture(page, "run")
    open_artifact(page, run, "rollout-batch-summary")
    page.get_by_text("48 in 8 groups").wait_for()
    picture(page, "summary")
    open_artifact(page, run, "rollout-batch-parity-plot")
    plot = page.locator("img").last
    plot.wait_for()
    assert 0 < plot.evaluate("image => image.naturalWidth"), "the plot is not drawn"
    open_artifact(page, run, "rollout-batch-parity")
    page.get_by_role("heading", name="Parity of").wait_for()
    page.get_by_text("equal_by_path: several samples").wait_for()
    picture(page, "parity")


def follow_progress(page: Page, run: str) -> list[int]:
    """The shares that the progress artifact's page shows, in percent, until the batch is done."""
    open_artifact(page, run, "rollout-batch-progress")
    seen, end = [0], time.monotonic() + 300
    while seen[-1] < 100:
        assert time.monotonic() < end, f"the batch does not end: {seen}"
        page.wait_for_timeout(1500)
        page.reload()
        text = page.get_by_text(re.compile(r"Progress: \d+")).inner_text()
        seen.append(int(re.search(r"\d+", text).group()))  # type: ignore[union-attr]
    return seen
