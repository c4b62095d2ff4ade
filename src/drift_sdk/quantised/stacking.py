"""One matrix of the rows of several, as fused projections need it."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.quantised.blocks import BlockWeight, join_blocks
from drift_sdk.quantised.fp8 import Fp8Weight, join_fp8
from drift_sdk.quantised.int4 import Int4Weight, join_int4
from drift_sdk.quantised.nvfp4 import Nvfp4Weight, join_nvfp4
from drift_sdk.quantised.weight import Matrix, QuantisedWeight, StackedWeight


def stack_rows(parts: Sequence[Matrix]) -> QuantisedWeight:
    """One weight of the rows of all parts, at least one of which is quantised.

    Parts of one format, with groups or blocks of the same width, become one weight of that format, without a
    change to any number; others become a StackedWeight.
    """
    joined: QuantisedWeight | None = None
    if all(isinstance(part, Fp8Weight) for part in parts):
        joined = join_fp8([part for part in parts if isinstance(part, Fp8Weight)])
    elif all(isinstance(part, Int4Weight) for part in parts):
        joined = join_int4([part for part in parts if isinstance(part, Int4Weight)])
    elif all(isinstance(part, Nvfp4Weight) for part in parts):
        joined = join_nvfp4([part for part in parts if isinstance(part, Nvfp4Weight)])
    elif all(isinstance(part, BlockWeight) for part in parts):
        joined = join_blocks([part for part in parts if isinstance(part, BlockWeight)])
    return joined or StackedWeight(tuple(parts))
