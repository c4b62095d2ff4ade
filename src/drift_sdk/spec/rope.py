"""The rotary position embedding as a value (RoFormer, arXiv 2104.09864): frequencies and their scaling.

Scalings are computed as in modeling_rope_utils of transformers.
"""

from __future__ import annotations

import math

import torch
from msgspec import Struct

__all__ = [
    "FrequencyFactors",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ProportionalScaling",
    "Rope",
    "RopeScaling",
    "YarnScaling",
    "inverse_frequencies",
]


class LinearScaling(Struct, frozen=True, kw_only=True):
    """All frequencies are divided by `factor`."""

    factor: float

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / periods / self.factor


class Llama3Scaling(Struct, frozen=True, kw_only=True):
    """The scaling of Llama 3.1.

    With c = original_max_position_embeddings, frequencies of wavelengths above c / low_freq_factor are
    divided by `factor`, those of wavelengths below c / high_freq_factor are kept, and those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        context = self.original_max_position_embeddings
        frequencies = 1.0 / periods
        wavelengths = 2 * math.pi / frequencies
        is_long = wavelengths > context / self.low_freq_factor
        is_short = wavelengths < context / self.high_freq_factor
        scaled = torch.where(is_long, frequencies / self.factor, frequencies)
        keep = (context / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - keep) * scaled / self.factor + keep * scaled
        return torch.where(is_long | is_short, scaled, blended)


class FrequencyFactors(Struct, frozen=True, kw_only=True):
    """Frequency i is divided by `factors[i]`. GGUF files store Llama 3.1's scaling in this form."""

    factors: tuple[float, ...]

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / periods / torch.tensor(self.factors, dtype=torch.float32, device="cpu")


class LongRopeScaling(Struct, frozen=True, kw_only=True):
    """The scaling of Phi-3 (LongRoPE, arXiv 2402.13753): frequency i is divided by `factors[i]`, and all
    cosines and sines are multiplied by `magnitude`.

    A model has two sets of factors. transformers changes to the long set when a sequence outgrows the
    context of pretraining. Here the longest sequence that the engine allows decides, so that the keys of a
    position do not depend on the tokens after it.
    """

    factors: tuple[float, ...]
    magnitude: float

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32, device="cpu") * periods)


class YarnScaling(Struct, frozen=True, kw_only=True):
    """The scaling of YaRN (arXiv 2309.00071): frequencies of pairs up to `first` are kept, those from `last`
    on are divided by `factor`, and those between are interpolated. All cosines and sines are multiplied by
    `magnitude`.

    first, last: indices of pairs, which need not be whole numbers.
    context:     tokens that the scaling reaches: `factor` times the context of pretraining.
    """

    factor: float
    first: float
    last: float
    magnitude: float
    context: int

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        pairs = torch.arange(len(periods), dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - self.first) / (self.last - self.first)).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


class ProportionalScaling(Struct, frozen=True, kw_only=True):
    """Frequencies of the first `num_pairs` pairs are divided by `factor`; the other pairs are not rotated."""

    num_pairs: int
    factor: float = 1.0

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        scaled = 1.0 / periods / self.factor
        scaled[self.num_pairs :] = 0.0
        return scaled


RopeScaling = (
    LinearScaling | Llama3Scaling | FrequencyFactors | LongRopeScaling | YarnScaling | ProportionalScaling
)


class Rope(Struct, frozen=True, kw_only=True):
    """A rotation of queries and keys.

    theta:       the base of the frequencies.
    rotary_dim:  the first so many elements of a head are rotated, in pairs of i and i + rotary_dim / 2.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    @property
    def magnitude(self) -> float:
        """The factor of all cosines and sines."""
        return self.scaling.magnitude if isinstance(self.scaling, LongRopeScaling | YarnScaling) else 1.0

    def frequencies(self) -> torch.Tensor:
        """The angle of each pair of elements per position, in radians: [rotary_dim / 2], float32 on the
        CPU."""
        return inverse_frequencies(self.rotary_dim, self.theta, self.scaling)


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """The angle of each pair of elements per position, in radians: [rotary_dim / 2], float32 on the CPU."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    periods = theta**exponents
    return 1.0 / periods if scaling is None else scaling.frequencies(periods)
