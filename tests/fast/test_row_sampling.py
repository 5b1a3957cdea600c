"""A row's own sampling parameters: only those that the batch allows, within its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import make_config
from rollout.errors import BadConfig
from rollout.row_sampling import PARAMETERS, parse_bounds, row_sampling

BOUNDS = "temperature=0:1.2, max_new_tokens=16:512"


def test_bounds_are_read_from_one_line():
    assert {"temperature": (0.0, 1.2), "max_new_tokens": (16.0, 512.0)} == parse_bounds(BOUNDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no parameter of a row"),
        ("seed=1:2", "'seed' is no parameter of a row"),
        ("temperature", "want name=least:greatest"),
        ("temperature=1", "want name=least:greatest"),
        ("temperature=a:b", "want name=least:greatest"),
        ("temperature=1:0", "the least value comes first"),
        ("temperature=0:inf", "both are finite"),
        ("temperature=nan:1", "the least value comes first"),
        ("temperature=0:1,temperature=0:2", "temperature stands twice"),
        ("temperature=0:11", "temperature 11: Input should be less than or equal to 10"),
        ("top_p=0:1", "top_p 0: Input should be greater than 0"),
        ("max_new_tokens=1.5:9", "max_new_tokens 1.5: Input should be a valid integer"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_in_one_line(text, words):
    with pytest.raises(BadConfig, match="sampling_bounds") as caught:
        make_config(sampling_bounds=text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_overrides_the_batchs_own_values_and_keeps_the_others():
    config = make_config(temperature=1.0, top_p=0.9, sampling_bounds=BOUNDS)
    assert {**config.sampling, "temperature": 0} == config.sampling_of({"sampling": {"temperature": 0}})
    assert config.sampling == config.sampling_of({}) == config.sampling_of({"sampling": None, "x": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 1.3}, "metadata.sampling.temperature is 1.3, want 0 to 1.2"),
        ({"max_new_tokens": 15}, "metadata.sampling.max_new_tokens is 15, want 16 to 512"),
        ({"max_new_tokens": 16.0}, "metadata.sampling.max_new_tokens is 16.0, want an integer"),
        ({"temperature": True}, "metadata.sampling.temperature is True, want a number"),
        ({"temperature": "1"}, "metadata.sampling.temperature is '1', want a number"),
        ({"temperature": None}, "metadata.sampling.temperature is None, want a number"),
        ({"top_p": 0.5}, "metadata.sampling.top_p: sampling_bounds allows only temperature, max_new_tokens"),
        ([1], "metadata.sampling is no object"),
    ],
)
def test_what_a_row_may_not_set_is_refused_with_its_name_and_bounds(given, words):
    with pytest.raises(ValueError) as caught:
        row_sampling({"sampling": given}, parse_bounds(BOUNDS))
    assert words == str(caught.value)


def test_without_bounds_a_row_sets_nothing():
    assert {} == row_sampling({}, None)
    with pytest.raises(ValueError, match="allow it with sampling_bounds"):
        row_sampling({"sampling": {}}, None)


@given(st.dictionaries(st.sampled_from([*PARAMETERS, "seed"]), st.integers() | st.floats() | st.booleans()))
def test_what_is_accepted_is_within_the_bounds_and_kept_as_it_was(sampling):
    bounds = parse_bounds(BOUNDS)
    try:
        kept = row_sampling({"sampling": sampling}, bounds)
    except ValueError:
        return
    assert sampling == kept and set(kept) <= set(bounds)
    assert all(bounds[name][0] <= value <= bounds[name][1] for name, value in kept.items())
