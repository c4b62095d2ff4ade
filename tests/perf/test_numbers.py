"""Numbers out of range are refused as arguments of measuring scripts, before anything is measured."""

from __future__ import annotations

import argparse
import importlib

import pytest

from perf.harness.numbers import at_least, over_zero


@pytest.mark.parametrize(
    ("least", "text", "number"), [(0, "0", 0), (1, "1", 1), (1, " 12 ", 12), (-2, "-2", -2)]
)
def test_whole_numbers_in_range_are_taken(least: int, text: str, number: int) -> None:
    assert at_least(least)(text) == number


@pytest.mark.parametrize(
    ("least", "text"), [(0, "-1"), (1, "0"), (1, "1.5"), (1, "x"), (1, ""), (0, "nan"), (0, "1e3")]
)
def test_whole_numbers_out_of_range_are_refused(least: int, text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"^{text}: expected a whole number of {least} or more$"
    ):
        at_least(least)(text)


def test_numbers_over_zero_are_taken() -> None:
    assert [over_zero(text) for text in ("0.5", "3", "1e-3")] == [0.5, 3.0, 0.001]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_numbers_that_are_not_over_zero_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text}: expected a number over 0$"):
        over_zero(text)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("decode", ("--repeats", "0"), "argument --repeats: 0: expected a whole number of 1 or more"),
        ("decode", ("--tensor-parallel", "0"), "argument --tensor-parallel: 0: expected a whole number of 1"),
        ("models", ("--repeats", "none"), "argument --repeats: none: expected a whole number of 1 or more"),
        ("speculative", ("--num-draft-tokens", "-1"), "argument --num-draft-tokens: -1: expected"),
        ("speculative", ("--acceptance-length", "nan"), "argument --acceptance-length: nan: expected"),
        ("serving", ("--seconds", "0"), "argument --seconds: 0: expected a number over 0"),
        ("stress", ("--num-long", "0"), "argument --num-long: 0: expected a whole number of 1 or more"),
        ("step_profile", ("--steps", "0"), "argument --steps: 0: expected a whole number of 1 or more"),
        ("prefill", ("--tokens", "0"), "argument --tokens: 0: expected a whole number of 1 or more"),
        ("kernel_speed", ("--rows", "0"), "argument --rows: 0: expected a whole number of 1 or more"),
        (
            "remote_overhead",
            ("--streams", "0"),
            "argument --streams: 0: expected a whole number of 1 or more",
        ),
        ("tune_experts", ("--jobs", "0"), "argument --jobs: 0: expected a whole number of 1 or more"),
    ],
)
def test_scripts_refuse_numbers_out_of_range(
    script: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"perf.{script}").main([*arguments])
    assert message in capsys.readouterr().err
