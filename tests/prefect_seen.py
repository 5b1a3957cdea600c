"""What a real Prefect server has to show, read through its API."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen


def ask(api: str, path: str, **body: Any) -> Any:
    """The answer to a POST of `body`."""
    request = Request(f"{api}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=20) as reply:
        return json.load(reply)


def artifacts_of(api: str, batch_id: str) -> dict[str, Any]:
    """The newest artifacts of a batch by key: their data, with the progress artifact's text as `progress-text`."""
    found: dict[str, Any] = {}
    for one in ask(api, "artifacts/filter", sort="CREATED_DESC"):
        if (one["description"] or "").startswith(batch_id):
            found.setdefault(one["key"], one["data"])
            if one["key"] == "rollout-batch-progress":
                found.setdefault("progress-text", one["description"])
    return found
