"""Other machines' clocks against this one's: times of several machines meet in one row and in one Delta log."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from rollout.doctor.finding import Finding, fail, ok, warn

WARN_S = 5.0
FAIL_S = 60.0


def judge_clock(whose: str, theirs: float, ours: float) -> Finding:
    """How far two clocks are apart that were read at one moment. Unix seconds."""
    skew = theirs - ours
    detail = f"{whose} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    if abs(skew) <= WARN_S:
        return ok("clock", f"{whose} agrees within {WARN_S:g} s")
    detail += ": set both by NTP"
    return fail("clock", detail) if abs(skew) > FAIL_S else warn("clock", detail)


def judge_date(whose: str, header: str | None, ours: float) -> Finding:
    """The same from an HTTP Date header, which has whole seconds, cut; `ours`: when it was received."""
    try:
        theirs = parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return warn("clock", f"{whose} sends no Date header that can be read ({header!r}): compare its clock yourself")
    return judge_clock(whose, theirs + 0.5, ours)
