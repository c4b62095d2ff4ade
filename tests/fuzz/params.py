"""Parameters of requests, with any value in any field, from Python and from JSON."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import strategies as st

from drift_sdk.errors import RequestError
from drift_sdk.sampling_params import SamplingParams

FIELDS = SamplingParams.__struct_fields__

texts = st.text(st.characters(), max_size=8)
numbers = (
    st.integers()
    | st.integers(-3, 130)
    | st.floats()
    | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**70), 10**4000, 1e-320, -0.0])
)
scalars = st.none() | st.booleans() | numbers | texts | st.binary(max_size=8) | st.complex_numbers()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=70)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)
ids = st.integers(0, 9)
biases = st.dictionaries(ids | ids.map(str) | scalars, st.floats(-101, 101) | numbers, max_size=4)
LIKELY: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-1, 21),
    float: st.floats(0, 1),
    tuple: st.lists(ids, max_size=4) | st.lists(st.text(min_size=1), max_size=4),
    type(None): st.none() | st.integers(-1, 21) | st.lists(ids),
}
likely = {name: LIKELY.get(type(getattr(SamplingParams(), name)), biases) for name in FIELDS}
wild = st.dictionaries(st.sampled_from(FIELDS), values | biases, max_size=2)
unknown = st.dictionaries(texts, values, max_size=1)
strategy = st.tuples(
    st.fixed_dictionaries({}, optional=likely),
    st.just({}) | wild | st.tuples(wild, unknown).map(lambda two: two[0] | two[1]),
).map(lambda parts: parts[0] | parts[1])


def run(data: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_dict(data)
        known = {name: value for name, value in data.items() if name in FIELDS}
        if all(isinstance(key, int) for key in data.get("logit_bias", {})):
            assert params == SamplingParams(**known)
    except RequestError as error:
        assert error.allowed and len(str(error)) < 3000
        raise

    assert pickle.loads(pickle.dumps(params)) == params
    hash(params)
