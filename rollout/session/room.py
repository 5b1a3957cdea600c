"""How many tokens a turn of a session may sample: what its limits leave behind the prompt."""

from __future__ import annotations

from rollout.errors import SessionRefused

CONTEXT_CODE = "context_length_exceeded"


class Room:
    """The least of a session's limits on a turn's ids, prompt and sampled together."""

    def __init__(self, max_seq_len: int | None, context_length: int | None) -> None:
        """`context_length` is the model's. An engine refuses a prompt that fills it together with max_new_tokens:
        one id stays unused.
        """
        usable = None if context_length is None else context_length - 1
        limits = [limit for limit in (max_seq_len, usable) if limit is not None]
        self._limit = min(limits) if limits else None

    def behind(self, n_prompt: int, wanted: int | None) -> int | None:
        """max_new_tokens behind a prompt of so many ids; None where nothing limits it.

        Args:
            wanted: what the client or the session's pins ask for.

        Raises:
            SessionRefused: 400, the prompt leaves no room.
        """
        if self._limit is None:
            return wanted
        room = self._limit - n_prompt
        if room <= 0:
            raise SessionRefused(
                400, f"the prompt has {n_prompt} tokens, {self._limit} is the limit", code=CONTEXT_CODE
            )
        return room if wanted is None else min(wanted, room)
