"""Agents that do each thing wrong that an agent can do. A test installs this module as a user's package.

Those of them that get so far make real turns first, so that there is something to keep.
"""

import asyncio
import os
import subprocess
import sys
import time

from openai import AsyncOpenAI, OpenAI

LENT = {}
"""The session that `lends_key` shows to `steals_key`."""


async def turns(base_url, api_key, messages, request_kwargs, n=1):
    """`n` turns on the session; the conversation."""
    messages = list(messages)
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=None) as client:
        for _ in range(n):
            reply = await client.chat.completions.create(model="m", messages=messages, extra_body=request_kwargs)
            messages += [reply.choices[0].message.model_dump(exclude_unset=True), {"role": "user", "content": "More."}]
    return messages


async def raises_at_once(base_url, prompt, request_kwargs, metadata, **kwargs):
    raise ValueError("at once")


async def raises_after_turns(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs, 3)
    raise ValueError("after three turns")


async def hangs(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs)
    await asyncio.Event().wait()


async def swallows_its_end(base_url, prompt, request_kwargs, metadata, **kwargs):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def blocks(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs)
    time.sleep(3600)


def blocks_plain(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    with OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model="m", messages=prompt, extra_body=request_kwargs)
    time.sleep(3600)


async def runs_busy(base_url, prompt, request_kwargs, metadata, **kwargs):
    while True:
        sum(range(1000))


async def forks(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs)
    for _ in range(5):
        subprocess.Popen(["sh", "-c", "sleep 3601 & sleep 3602"])
    await asyncio.create_subprocess_exec("sleep", "3603")
    await asyncio.to_thread(subprocess.Popen, ["sleep", "3604"])
    if os.fork() == 0:
        time.sleep(3600)


async def waits_with_children(base_url, prompt, request_kwargs, metadata, **kwargs):
    subprocess.Popen(["sleep", "3609"])
    subprocess.Popen(["setsid", "setsid", "sleep", "3610"])
    await asyncio.Event().wait()


async def floods(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs)
    for _ in range(8_000):
        print("flood " * 40)
    sys.stdout.flush()
    os.system("yes flood | head -c 4000000")


async def returns_junk(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    await turns(base_url, api_key, prompt, request_kwargs)
    return {"metadata": {"handle": object()}}


async def makes_no_call(base_url, prompt, request_kwargs, metadata, **kwargs):
    return {"metadata": {"answer": "7"}, "reward": 1.0}


async def exits(base_url, prompt, request_kwargs, metadata, **kwargs):
    sys.exit("enough")


async def lends_key(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    LENT.update(base_url=base_url, api_key=api_key)
    history = await turns(base_url, api_key, prompt, request_kwargs)
    while "stolen" not in LENT:
        await asyncio.sleep(0.01)
    await turns(base_url, api_key, history, request_kwargs)


async def steals_key(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    while "api_key" not in LENT:
        await asyncio.sleep(0.01)
    try:
        await turns(LENT["base_url"], api_key, prompt, request_kwargs)
    except Exception as error:
        LENT["stolen"] = str(error)
    await turns(base_url, LENT["api_key"], prompt, request_kwargs)


def nan_reward(rollout):
    """Right for those that say so, else not a number, too late, or an exception, by the row's metadata."""
    wanted = rollout.row.metadata.get("judge")
    if wanted == "raises":
        raise KeyError("judge")
    if wanted == "hangs":
        time.sleep(3600)
    return float("nan") if wanted == "nan" else float(rollout.row.metadata.get("reward", 1.0))
