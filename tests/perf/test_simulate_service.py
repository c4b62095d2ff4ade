"""A service in virtual time: all requests are served, and planning late brings first tokens earlier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drift_sdk._kernels.gemm import tuning
from perf import simulate_service
from perf.service.load import Case
from perf.simulate_service import HEAD, LAYER, ProductTimes, Simulation, StepModel, model_buckets, simulate

GPU = "nvidia-h100-80gb-hbm3"
TUNED = Path(tuning.__file__).parent / "tuned"


def test_products_between_measured_rows_take_times_between() -> None:
    times = ProductTimes(GPU, (6144, 4096, False))
    assert times.rows[:3] == [1, 4, 16]
    assert times.of(1) == times.of(0) == times.us[0]
    assert times.of(10) == pytest.approx((times.us[1] + times.us[2]) / 2)
    assert times.of(times.rows[-1]) == times.us[-1] < times.of(2 * times.rows[-1])


@pytest.mark.parametrize("gpu", [file.stem for file in sorted(TUNED.glob("*.json"))])
def test_every_shipped_table_has_the_times(gpu: str) -> None:
    """An entry may have remarks behind its times."""
    for shape in (*LAYER, HEAD):
        times = ProductTimes(gpu, shape)
        assert times.rows == sorted(times.rows) and times.rows[0] == 1
        assert 0 < times.us[0] < times.us[-1]


@pytest.mark.parametrize("name", ["closed-4", "open-40", "prefix"])
def test_every_request_gets_its_tokens(name: str) -> None:
    case = replace(Case.parse(name), num_requests=40)
    clients = Simulation(case, StepModel(GPU), model_buckets(), "0", 1500.0).run()
    assert len(clients) == 40
    for client in clients:
        assert len(client.times_us) == client.request.num_tokens
        assert client.sent_us < client.times_us[0] and client.times_us == sorted(client.times_us)
    if name == "closed-4":
        running = [client for client in clients if client.sent_us == 0.0]
        assert len(running) == 4


def test_late_plans_bring_first_tokens_earlier_at_no_cost() -> None:
    case, model, buckets = replace(Case.parse("closed-16"), num_requests=96), StepModel(GPU), model_buckets()
    at_once, late = (simulate(case, model, buckets, "0", margin_us) for margin_us in (None, 1500.0))
    assert late.ttft_ms[0] < 0.9 * at_once.ttft_ms[0]
    assert late.tokens_per_s > 0.99 * at_once.tokens_per_s
    assert late.itl_ms[2] < 1.05 * at_once.itl_ms[2]


def test_command_shows_a_line_for_each_case_and_margin(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--cases closed-4 open-20 --margin-ms at-once 2 --num-requests 12".split()
    simulate_service.main(arguments)
    shown = capsys.readouterr().out
    assert shown.count("closed-4") == shown.count("open-20") == shown.count("at once") == 2
    assert shown.count("2 ms before") == 2
