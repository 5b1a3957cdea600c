"""`NAME=VALUE` as a flow run's parameters."""

import pytest

from flows.trigger import parse_parameters
from rollout.errors import BadConfig


def test_values_are_json_or_text():
    given = ["seed=3", "temperature=0.5", "reward=null", "skip_bad_prompts=true", "lake=s3://a/b?c=d", 'batch_id="7"']
    assert {
        "seed": 3,
        "temperature": 0.5,
        "reward": None,
        "skip_bad_prompts": True,
        "lake": "s3://a/b?c=d",
        "batch_id": "7",
    } == parse_parameters(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["seed"], "--param 'seed': give NAME=VALUE"),
        (["=3"], "--param '=3': give NAME=VALUE"),
        (["seed=1", "seed=2"], "--param seed is given twice"),
        (["temperature=NaN"], "temperature: NaN is no number"),
        (["temperature=-Infinity"], "temperature: -Infinity is no number"),
        (["temperature=1e999"], "temperature: 1e999 is no number"),
    ],
)
def test_what_is_no_parameter_is_refused(given: list[str], says: str):
    with pytest.raises(BadConfig) as caught:
        parse_parameters(given)
    assert says in str(caught.value)
