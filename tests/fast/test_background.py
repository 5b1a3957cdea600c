"""Work beside a block: it ends with the block, and its own failure is not lost."""

import asyncio

import pytest

from rollout.background import beside


async def test_it_is_cancelled_and_waited_for_when_the_block_is_left():
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async with beside(work()) as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert [True] == ended and task.cancelled()


async def test_its_result_can_be_had_and_its_failure_comes_out():
    async def good() -> int:
        return 7

    async def bad() -> None:
        raise ValueError("broken")

    async with beside(good()) as task:
        assert 7 == await task
    with pytest.raises(ValueError, match="broken"):
        async with beside(bad()):
            await asyncio.sleep(0)
