"""What holds for every flow and task, whoever adds one (case G49)."""

import importlib
import pkgutil
from types import ModuleType

import pytest
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE

import flows
import tasks


def modules(package: ModuleType) -> list[ModuleType]:
    names = [name for _, name, _ in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in names if name != "tasks.ray"]  # needs an extra; has no task


TASKS = {id(thing): thing for m in modules(tasks) for thing in vars(m).values() if isinstance(thing, Task)}
FLOWS = {id(thing): thing for m in modules(flows) for thing in vars(m).values() if isinstance(thing, Flow)}


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_task_is_never_answered_from_a_cache_and_keeps_no_result(task: Task):
    assert (NO_CACHE, False, True) == (task.cache_policy, task.persist_result, task.isasync)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=lambda flow: flow.name)
def test_a_flow_is_async_and_keeps_no_result(flow: Flow):
    assert (True, False) == (flow.isasync, flow.persist_result)


def test_all_of_them_are_found():
    assert {"rollout-batch", "rollout-cross-engine"} <= {flow.name for flow in FLOWS.values()}
    assert {"plan", "roll out shard", "publish"} <= {task.name for task in TASKS.values()}
