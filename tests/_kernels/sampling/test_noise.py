"""The reference of the noise: known answers, and its distribution."""

from __future__ import annotations

import math

import pytest
import torch

from drift_sdk.execution.eager.sampling import gumbel_noise, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers of philox4x32-10 from the Random123 distribution.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_known_answers(counter, key, words) -> None:
    seed = key[1] << 32 | key[0]
    seed -= 2**64 if seed >= 2**63 else 0
    tensors = tuple(torch.tensor([word], dtype=torch.int64) for word in counter)
    assert tuple(int(word) for word in philox(torch.tensor([seed]), tensors)) == words


def noise_of(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0]


def test_noise_depends_only_on_seed_position_and_token() -> None:
    seeds, positions = torch.tensor([1, 2**63 - 1, 7, 7]), torch.tensor([0, 5, 2**31 - 1, 5])
    together = gumbel_noise(seeds, positions, 1001)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(together[row], noise_of(seed, position, 1001))
        for vocab_size in (1, 2, 3, 4, 5, 999):
            assert torch.equal(together[row, :vocab_size], noise_of(seed, position, vocab_size))
    assert len({tuple(row.tolist()) for row in together}) == 4


def test_noise_is_distributed_as_standard_gumbel() -> None:
    noise = torch.cat([noise_of(seed, 3, 100_000) for seed in range(4)]).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772156649) < 4 * 1.2825 / math.sqrt(noise.numel())
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    # Kolmogorov-Smirnov distance to exp(-exp(-x)).
    ordered = noise.sort().values
    steps = torch.arange(1, noise.numel() + 1, dtype=torch.float64) / noise.numel()
    distance = (torch.exp(-torch.exp(-ordered)) - steps).abs().max().item()
    assert distance < 1.95 / math.sqrt(noise.numel())
    # Neighbouring positions and tokens are uncorrelated.
    other = torch.cat([noise_of(seed, 4, 100_000) for seed in range(4)]).double()
    for pair in (torch.stack([noise, other]), torch.stack([noise[1:], noise[:-1]])):
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.01
