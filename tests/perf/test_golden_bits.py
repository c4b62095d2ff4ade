"""Golden hashes: reproducible inputs, one hash for each case, and honest comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drift_sdk._kernels.attention.decode import AttentionConfig
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.gemm import tuning
from perf import golden_bits
from perf.golden_bits import (
    CASES,
    AttentionCase,
    BitsDiffer,
    GoldenBits,
    ProductCase,
    compare,
    current_hashes,
    main,
    noise,
    read_golden,
    write_golden,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled: tests/gpu covers it")

FEW = AttentionConfig(num_programs=4)
SMALL = (
    ProductCase(64, 256, torch.float32, row_counts=(1, 3)),
    ProductCase(64, 128, torch.float32, is_gated=True, row_counts=(1, 3)),
    AttentionCase(4, 2, 16, torch.float32, (40,), 2, Partitions(32, 64, 2, 16), FEW),
)


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, whose bits may depend on the tile: rows are not compared."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)


def test_noise_is_exact_in_short_types_and_has_known_values() -> None:
    found = noise((3, 1000), 7, "cpu", torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(noise((3, 1000), 7, "cpu", dtype).float(), found)
    assert found.abs().max() <= 1.0 and len(found.unique()) > 500
    assert found.mean().abs() < 0.02
    assert not torch.equal(found, noise((3, 1000), 8, "cpu", torch.float32))
    assert found[0, :4].tolist() == [0.001220703125, -0.4453125, 0.033203125, -0.001953125]


@pytest.mark.usefixtures("one_block")
def test_hashes_change_with_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = current_hashes("cpu", SMALL)
    product, gated, attention = SMALL
    assert product.hash("cpu") == expected[str(product)] and len(set(expected.values())) == len(SMALL)
    monkeypatch.setattr(tuning, "num_slices", lambda *_, is_whole: 1)
    assert product.hash("cpu") != expected[str(product)]
    assert gated.hash("cpu") == expected[str(gated)]
    wider = AttentionCase(4, 2, 16, torch.float32, (40,), 2, Partitions(64, 128, 2, 16), FEW)
    assert str(wider) == str(attention) and wider.hash("cpu") != expected[str(attention)]


def test_rows_with_other_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    for case in SMALL:
        with pytest.raises(BitsDiffer, match=str(case)):
            case.hash("cpu")


def test_comparison_reports_missing_and_different_hashes(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    assert read_golden(file) == {}
    assert "no golden hashes" in compare(None, {"a": "1"})[0]
    golden = GoldenBits(provenance="a GPU", hashes={"a": "1", "b": "2"})
    write_golden(file, {"9.0": golden})
    assert read_golden(file) == {"9.0": golden}
    assert compare(golden, {"a": "1", "b": "2"}) == []
    assert compare(golden, {"a": "1", "b": "3", "c": "4"}) == [
        "b: 3, expected 2 (a GPU)",
        "c: no golden hash",
    ]


def test_hashes_without_a_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "an NVIDIA GPU is needed" in capsys.readouterr().err
    assert len({str(case) for case in CASES}) == len(CASES)
    assert golden_bits.FILE.parent.is_dir()
