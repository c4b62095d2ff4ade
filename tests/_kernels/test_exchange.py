"""Exchanges of ranks that lie in one memory: their flags are raised before, and each rank runs in turn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from references.exchange import add_norm_across_reference, gather_logits_reference, share_drafts_reference

from drift_sdk._kernels.exchange import PeerSums, PeerTensor, add_norm_across, begin_exchange, gather_logits
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.exchange import Exchange, ExchangeSizes, open_exchanges

pytestmark = pytest.mark.kernel

EPS = 1e-5
NUM_SUMS = 6
SIZES = ExchangeSizes(num_sums=NUM_SUMS, sum_size=2 * 3 * 1024, logits_size=3 * 3000, num_drafts=40)
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


class SharedDevice:
    """A GPU, or the CPU, that has the memory of all ranks."""

    def __init__(self, device: str) -> None:
        self.torch_device = torch.device(device)

    def work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)


def armed(num_ranks: int, device: str) -> list[Exchange]:
    found = open_exchanges([SharedDevice(device) for _ in range(num_ranks)], SIZES)
    for exchange in found:
        exchange.arm(0.05)
    return found


@pytest.fixture
def exchanges(device: str) -> list[Exchange]:
    return armed(2, device)


def is_empty(part: torch.Tensor) -> bool:
    return bool((part.view(torch.int32) == -1).all())


def raise_flags(exchanges: Sequence[Exchange], flag: int, epoch: int = 1) -> None:
    for exchange in exchanges:
        exchange._memory.flags[:, flag] = epoch


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize(
    ("num_slices", "num_rows", "size", "options"),
    [
        (1, 1, 1024, {}),
        (2, 3, 576, {"bias": True, "aux_hidden": True, "normed_multiplier": 0.5}),
        (2, 2, 80, {"delta_norm": True, "delta_multiplier": 0.3, "norm_kind": "offset"}),
        (1, 2, 80, {"delta_norm": True, "delta_eps": 2.0, "norm_kind": "offset"}),
    ],
)
def test_sums_across_ranks_have_the_bits_of_one_gpu(
    num_slices: int,
    num_rows: int,
    size: int,
    options: dict[str, Any],
    exchanges: list[Exchange],
    device: str,
) -> None:
    deltas = random(2, num_slices, num_rows, size, device=device, seed=1)
    hidden = random(num_rows, size, dtype=DTYPE, device=device, seed=2)
    weight = random(size, dtype=DTYPE, device=device, seed=3)
    options = {
        name: random(size, dtype=DTYPE, device=device, seed=4) if name in ("bias", "delta_norm") else value
        for name, value in options.items()
    }
    has_aux = options.pop("aux_hidden", False)
    expected_hidden, expected = hidden.clone(), torch.full_like(hidden, torch.nan)
    add_norm(expected_hidden, deltas.view(-1, num_rows, size), weight, expected, eps=EPS, **options)
    for index in (4, 5):  # one in each of the two buffers
        sums = [exchange.sums(index, (num_slices, num_rows, size)) for exchange in exchanges]
        for own, delta in zip(sums, deltas, strict=True):
            own.own.copy_(delta)
        sums[0].parts[1].copy_(deltas[1])  # as the second rank does, if it runs at the same time
        for own in sums:
            found, normed, aux = hidden.clone(), torch.full_like(hidden, torch.nan), torch.empty_like(hidden)
            aux_hidden = aux if has_aux else None
            add_norm_across(found, own, weight, normed, eps=EPS, aux_hidden=aux_hidden, **options)
            assert torch.equal(found, expected_hidden) and torch.equal(normed, expected)
            assert not has_aux or torch.equal(aux, expected_hidden)
        if device == "cpu":  # where the second rank has run after the first one
            assert not is_empty(sums[0].parts[1])
        assert is_empty(sums[1].parts[0])
    options.pop("normed_multiplier", None)
    reference = add_norm_across_reference(hidden, list(deltas), weight, eps=EPS, **options)[0]
    assert torch.equal(expected_hidden, reference)
    for exchange in exchanges:
        exchange.check()


def test_four_ranks_add_their_slices_in_order(device: str) -> None:
    """Each rank has got what those before it have sent; what comes from others is stored here."""
    num_ranks, num_rows, size = 4, 3, 576
    deltas = random(num_ranks, 2, num_rows, size, device=device, seed=1)
    hidden = random(num_rows, size, dtype=DTYPE, device=device, seed=2)
    weight = random(size, dtype=DTYPE, device=device, seed=3)
    expected_hidden, expected = hidden.clone(), torch.empty_like(hidden)
    add_norm(expected_hidden, deltas.view(-1, num_rows, size), weight, expected, eps=EPS)
    exchanges = armed(num_ranks, device)
    for index in (0, 1, 2):
        sums = [exchange.sums(index, (2, num_rows, size)) for exchange in exchanges]
        for rank, own in enumerate(sums):
            own.parts[rank:].copy_(deltas[rank:])
        for own in sums:
            found, normed = hidden.clone(), torch.empty_like(hidden)
            add_norm_across(found, own, weight, normed, eps=EPS)
            assert torch.equal(found, expected_hidden) and torch.equal(normed, expected)
    for exchange in exchanges:
        exchange.check()


def test_a_number_with_the_bits_of_an_empty_place_is_sent_as_another_nan(
    exchanges: list[Exchange], device: str
) -> None:
    sums = [exchange.sums(0, (1, 1, 64)) for exchange in exchanges]
    for own in sums:
        own.own.view(torch.int32).fill_(-1)
    sums[0].parts[1].fill_(1.0)
    hidden, weight = torch.ones(1, 64, device=device), torch.ones(64, device=device)
    for own in sums:
        add_norm_across(hidden, own, weight, torch.empty_like(hidden), eps=EPS)
    assert hidden.isnan().all()
    for exchange in exchanges:
        exchange.check()


def test_logits_are_gathered_in_the_order_of_ranks(exchanges: list[Exchange], device: str) -> None:
    parts = random(2, 3, 3000, device=device, seed=1)
    own_parts = [exchange.logits((3, 3000)) for exchange in exchanges]
    for own, part in zip(own_parts, parts, strict=True):
        own.own.copy_(part)
    raise_flags(exchanges, 0)
    for own in own_parts:
        logits = torch.full((3, 6000), torch.nan, device=device)
        gather_logits(own, logits)
        assert torch.equal(logits, gather_logits_reference(list(parts)))
    for exchange in exchanges:
        exchange.check()


def test_a_step_begins_when_all_ranks_have_come_to_it(exchanges: list[Exchange]) -> None:
    """The epoch goes on by 1, and around its largest value."""
    for epoch in (2, 3):
        raise_flags(exchanges[:1], 1, epoch)  # as the second rank does
        exchanges[0].begin()
        assert int(exchanges[0]._memory.epoch) == epoch
        assert int(exchanges[1]._memory.flags[0, 1]) == epoch
    exchanges[0]._memory.epoch.fill_(2**31 - 1)
    raise_flags(exchanges[:1], 1, -(2**31))
    exchanges[0].begin()
    assert int(exchanges[0]._memory.epoch) == -(2**31)
    exchanges[0].check()


@pytest.mark.parametrize("num_rows", [1, 40])
def test_drafts_are_those_of_the_first_rank(num_rows: int, exchanges: list[Exchange], device: str) -> None:
    def columns() -> list[torch.Tensor]:
        return [torch.randint(-1, 100, (num_rows,), dtype=torch.int32, device=device) for _ in range(3)]

    of_ranks = [columns(), columns()]
    expected = share_drafts_reference(of_ranks)
    for exchange, own in zip(exchanges, of_ranks, strict=True):
        exchange.share_drafts(own)
        exchange.check()
        assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))


@pytest.mark.parametrize("is_armed", [False, True])
def test_a_rank_without_an_answer_keeps_its_drafts(
    is_armed: bool, exchanges: list[Exchange], device: str
) -> None:
    """The first rank's memory has rows of another step: as slots they would lie outside of all tables."""
    exchange = exchanges[1]
    exchanges[0]._drafts.view(torch.int32).fill_(2**31 - 1)
    if not is_armed:
        exchange.disarm()
    own = [torch.arange(40, dtype=torch.int32, device=device) + column for column in range(3)]
    expected = [column.clone() for column in own]
    exchange.share_drafts(own)
    assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))


@pytest.mark.parametrize("place", ["sum 3 of 6", "logits", "beginning", "drafts"])
def test_a_rank_that_does_not_come_is_reported_once(
    place: str, exchanges: list[Exchange], device: str
) -> None:
    """Nothing waits after that."""
    exchange = exchanges[1]
    hidden, weight = torch.ones(1, 64, device=device), torch.ones(64, device=device)
    if place == "beginning":
        exchange.begin()
    elif place == "drafts":
        exchange.share_drafts([torch.zeros(1, dtype=torch.int32, device=device)] * 3)
    elif place == "logits":
        gather_logits(exchange.logits((1, 8)), torch.empty(1, 16, device=device))
    else:
        sums = exchange.sums(3, (1, 1, 64))
        sums.own.fill_(1.0)
        add_norm_across(hidden, sums, weight, torch.empty_like(hidden), eps=EPS)
    if device == "cuda":
        torch.cuda.synchronize()
    assert int(exchange._memory.limit) == 0
    assert hidden.isfinite().all()  # kernels that follow get numbers
    with pytest.raises(ExecutorError, match=f"GPU 1 .*too long.*{place}"):
        exchange.check()
    exchanges[0].check()
    exchange._memory.report.zero_()
    exchange.begin()  # with a flag that nobody raised
    exchange.check()


def test_nothing_waits_before_ranks_are_armed(device: str) -> None:
    exchange = open_exchanges([SharedDevice(device), SharedDevice(device)], SIZES)[0]
    exchange.begin()
    exchange.check()
    exchange.arm(1.0)
    assert int(exchange._memory.limit) == 10**9
    exchange.arm(1e-12)
    assert int(exchange._memory.limit) == 1
    exchange.disarm()
    exchange.begin()
    exchange.check()


def test_an_exchange_keeps_the_memory_of_its_peers(device: str) -> None:
    class RecordingDevice(SharedDevice):
        def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> torch.Tensor:
            block = super().mapped_memory(num_bytes, peers)
            kept.append(weakref.ref(block))
            return block

    kept: list[weakref.ref[torch.Tensor]] = []
    exchange = open_exchanges([RecordingDevice(device), RecordingDevice(device)], SIZES)[0]
    gc.collect()
    assert all(block() is not None for block in kept)
    del exchange
    gc.collect()
    assert all(block() is None for block in kept)


def test_buffers_do_not_overlap(exchanges: list[Exchange]) -> None:
    exchange = exchanges[0]
    sums = [exchange.sums(index, (2, 3, 1024)).parts for index in (0, 1)]
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in (*sums[0], *sums[1], exchange.logits((3, 3000)).own)
    ]
    flags = exchange._memory.flags
    ends = [flags.data_ptr() + flags.nbytes, *(end for _, end in spans)]
    assert all(end <= start for end, (start, _) in zip(ends, spans, strict=False))
    for parts in (exchange.sums(2, (1, 1, 8)).parts, exchange.sums(0, (2, 3, 1024)).parts):
        assert [part.data_ptr() for part in parts] == [start for start, _ in spans[:2]]


@pytest.mark.parametrize("case", ["ranks", "place", "shape"])
def test_wrong_arguments_are_rejected(case: str, exchanges: list[Exchange], device: str) -> None:
    hidden, weight = torch.ones(1, 64, device=device), torch.ones(64, device=device)
    memory, sums = exchanges[0]._memory, exchanges[0].sums(0, (1, 1, 64))
    wrong = {
        "ranks": PeerSums(memory=memory, parts=sums.parts[:1], flag=3),
        "place": PeerSums(memory=memory, parts=sums.parts.clone(), flag=3),
        "shape": PeerSums(memory=memory, parts=sums.parts[..., :32], flag=3),
    }
    with pytest.raises(ValueError, match="delta: "):
        add_norm_across(hidden, wrong[case], weight, torch.empty_like(hidden), eps=EPS)
    part = exchanges[0].logits((1, 8))
    with pytest.raises(ValueError, match="part: flag 3"):
        gather_logits(PeerTensor(memory=memory, own=part.own, flag=3), torch.empty(1, 16, device=device))


def test_flags_of_all_peers_are_raised(exchanges: list[Exchange]) -> None:
    begin_exchange(exchanges[1]._memory, 2)
    assert exchanges[0]._memory.flags.tolist() == [[0, 0, 0], [0, 0, 2]]
