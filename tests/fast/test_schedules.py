"""G28: a nightly schedule gives one batch per local day, also where the clock changes, and the id says which."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect.server.schemas.schedules import CronSchedule

import flows
from rollout.batch.plan import make_batch_id
from tasks import plan as plan_tasks

FILE = Path(flows.__file__).with_name("prefect.yaml")
SCHEDULES = [one for row in yaml.safe_load(FILE.read_text())["deployments"] for one in row.get("schedules", [])]
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
CHANGES = [
    ("Europe/Berlin", date(2026, 3, 29)),
    ("Europe/Berlin", date(2026, 10, 25)),
    ("US/Eastern", date(2026, 11, 1)),
]


async def slots(cron: str, zone: str, around: date) -> list[datetime]:
    """Five local days' slots, the third of them on the day itself."""
    start = datetime.combine(around - timedelta(days=2), datetime.min.time(), ZoneInfo(zone))
    dates = await CronSchedule(cron=cron, timezone=zone).get_dates(start=start, end=start + timedelta(days=5))
    return [slot.astimezone(ZoneInfo(zone)) for slot in dates]


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize(
    "cron", ["30 2 * * *", "30 1 * * *", *(one["cron"].replace("* * 0", "* * *") for one in SCHEDULES)]
)
async def test_g28_there_is_one_slot_per_local_day_and_its_id_says_which(cron: str, zone: str, day: date):
    found = await slots(cron, zone, day)
    assert [day + timedelta(days=n) for n in range(-2, 3)] == [slot.date() for slot in found]
    ids = [make_batch_id("nightly", slot, CREATED, "0" * 32) for slot in found]
    assert 5 == len(set(ids))
    assert [f"nightly-{slot:%Y%m%d}" for slot in found] == [name[: len("nightly-20261025")] for name in ids]


async def test_g28_half_past_two_that_does_not_exist_or_comes_twice():
    spring, autumn = [(await slots("30 2 * * *", zone, day))[2] for zone, day in CHANGES[:2]]
    assert "nightly-20260329t0330p0200" == make_batch_id("nightly", spring, CREATED, "0" * 32)
    assert "nightly-20261025t0230p0200" == make_batch_id("nightly", autumn, CREATED, "0" * 32)


async def test_two_triggers_of_one_slot_are_one_batch(monkeypatch):
    """Of two schedulers, or a slot that was scheduled again: other flow runs, the same deployment and slot."""
    slot = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    schedule = SimpleNamespace(schedule=SimpleNamespace(timezone="Europe/Berlin"))

    class Server:
        """Stands in for Prefect's client; the schedule is what the real one returns of it."""

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def read_deployment(self, _):
            return SimpleNamespace(name="nightly", schedules=[schedule])

    monkeypatch.setattr(plan_tasks, "get_client", Server)
    ids = set()
    for created in (slot, slot + timedelta(minutes=9)):
        run = SimpleNamespace(
            id=uuid4(), created=created, deployment_id=uuid4(), auto_scheduled=True, expected_start_time=slot
        )
        context = SimpleNamespace(get=lambda run=run: SimpleNamespace(flow_run=run))
        monkeypatch.setattr(plan_tasks, "FlowRunContext", context)
        origin = await plan_tasks.flow_run_origin()
        ids.add(make_batch_id(origin.deployment, origin.slot, origin.created_at, origin.flow_run_id))
    assert {"nightly-20261025t0230p0200"} == ids
