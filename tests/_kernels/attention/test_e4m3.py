"""Codes of e4m3 and how they lie in a cache, against torch's own."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from references.attention import pack_cache, unpack_cache

from drift_sdk._kernels.attention.cache import cache_words, decode_pairs, encode_e4m3, is_decoded_in_pairs
from drift_sdk._kernels.launch.kernel import kernel
from drift_sdk.quantised.formats import E4M3, MAX_E4M3, quantise_e4m3

pytestmark = pytest.mark.kernel


@kernel
def _encode(x_ptr, scale_ptr, codes_ptr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    codes = encode_e4m3(tl.load(x_ptr + place).to(tl.float32), tl.load(scale_ptr))
    tl.store(codes_ptr + place, codes.to(tl.uint8))


@kernel
def _decode(words_ptr, low_ptr, high_ptr, SIZE: tl.constexpr, IN_PAIRS: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = decode_pairs(tl.load(words_ptr + place), low_ptr.dtype.element_ty, IN_PAIRS)
    tl.store(low_ptr + place, low)
    tl.store(high_ptr + place, high)


def all_bfloat16(device: str) -> torch.Tensor:
    return torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # signalling NaN, and quotients that overflow
@pytest.mark.parametrize("scale", [1.0, 0.0173, 2.0**-9, 3.1e4])
def test_codes_of_all_bfloat16_numbers_are_those_of_torch(scale: float, device: str) -> None:
    x, scales = all_bfloat16(device), torch.tensor([scale], device=device)
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    _encode[(16,)](x, scales, codes, SIZE=4096)
    expected = quantise_e4m3(x, scales)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert expected.float().isfinite().all()

    # torch's conversion gives the same codes, except for NaN and numbers that overflow.
    quotient = x.float() / scale
    inside = quotient.abs() <= MAX_E4M3
    assert torch.equal(expected[inside].view(torch.uint8), quotient[inside].to(E4M3).view(torch.uint8))
    beyond = quotient.abs() > MAX_E4M3
    assert torch.equal(expected[beyond].float(), quotient[beyond].sign() * MAX_E4M3)
    assert expected[x.isnan()].float().eq(0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_numbers_of_all_pairs_of_codes_are_those_of_torch(dtype: torch.dtype, device: str) -> None:
    words = torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16)
    low, high = torch.empty(2, len(words), dtype=dtype, device=device)
    _decode[(16,)](words, low, high, SIZE=4096, IN_PAIRS=is_decoded_in_pairs(dtype))
    codes = words.view(torch.uint8).view(-1, 2)
    for found, expected in ((low, codes[:, 0]), (high, codes[:, 1])):
        numbers = expected.contiguous().view(E4M3).float()
        numbers = torch.where(numbers.isnan(), 480.0 - 960.0 * (expected >> 7), numbers)
        assert torch.equal(found.float(), numbers)
        assert torch.equal(found.signbit(), expected >= 128)


def test_packed_caches_hold_both_halves_of_the_dimensions_side_by_side() -> None:
    codes = torch.arange(24, dtype=torch.uint8).view(2, 12).view(E4M3)
    packed = pack_cache(codes)
    assert packed.view(torch.uint8)[0].tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert torch.equal(unpack_cache(packed).view(torch.uint8), codes.view(torch.uint8))


def test_words_of_other_caches_are_their_numbers() -> None:
    numbers = torch.zeros(2, 4)
    assert cache_words(numbers) is numbers
