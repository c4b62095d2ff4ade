"""The bits of products and attention on this GPU are those in perf/results/golden-bits.json."""

from __future__ import annotations

import pytest

from perf.golden_bits import CASES, FILE, Case, capability, read_golden

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_equal_the_golden_hash(case: Case) -> None:
    """A case without a hash fails: a missing hash shows nothing."""
    golden = read_golden().get(capability())
    assert golden is not None, f"{FILE} has no hashes of capability {capability()}"
    assert str(case) in golden.hashes, f"{FILE} has no hash of {case}"
    assert case.hash("cuda") == golden.hashes[str(case)], golden.provenance
