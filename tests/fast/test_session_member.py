"""What a process of a range of session servers is started with."""

from dataclasses import fields, replace
from pathlib import Path

from rollout.session.member import member_argv, read_member
from rollout.session.options import ServerOptions
from rollout.session.routing import Place

OPTIONS = ServerOptions(
    engine="http://127.0.0.1:9,http://127.0.0.1:10", tokenizer=Path("/models/tiny"), port=8100, max_sessions=7
)
PLACE = Place(slot=1, size=3, host="127.0.0.1", first_port=8100)


def test_every_option_reaches_the_process():
    assert (OPTIONS, PLACE, 5) == read_member(member_argv(OPTIONS, PLACE, 5)[-1], None)


def test_the_drivers_token_is_in_no_argument():
    options = replace(OPTIONS, driver_token="driver-secret")
    argv = member_argv(options, PLACE, 5)
    assert not any("driver-secret" in word for word in argv)
    assert options == read_member(argv[-1], "driver-secret")[0]
    assert "driver_token" in {field.name for field in fields(ServerOptions)}


def test_each_process_has_a_journal_of_its_own():
    options = replace(OPTIONS, journal=Path("/state/journal"))
    places = [replace(PLACE, slot=slot) for slot in range(3)]
    read = [read_member(member_argv(options, place, 5)[-1], None)[0].journal for place in places]
    assert [Path(f"/state/journal/process-{slot}") for slot in range(3)] == read
