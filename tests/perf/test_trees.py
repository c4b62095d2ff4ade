"""Chains against trees: the trees that are chosen, what they emit on average, and when they pay."""

from __future__ import annotations

import msgspec
import pytest

from drift_sdk import StaticTree
from drift_sdk.execution.drafter_factory import NO_DRAFTER
from perf.harness.table import progress
from perf.trees import (
    Comparison,
    Kind,
    TreeRun,
    best_tree,
    break_even,
    chain_paths,
    first_paths,
    main,
    table_rows,
    tokens_of_tree,
)


def test_best_tree_takes_the_likeliest_paths_first() -> None:
    assert best_tree(4, 0.6) == ((0,), (0, 0), (1,), (0, 0, 0))
    for number in (3, 15, 63):
        assert StaticTree(best_tree(number)).num_draft_tokens == number


def test_tokens_of_a_round_are_the_sum_of_the_paths_probabilities() -> None:
    assert tokens_of_tree(((0,), (1,), (0, 0)), 0.5) == 1 + 0.5 + 0.25 + 0.25
    assert tokens_of_tree(chain_paths(3), 0.7) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)
    assert tokens_of_tree(best_tree(7, 0.6), 0.6) > tokens_of_tree(chain_paths(7), 0.6)


def test_fewer_drafts_of_a_tree_are_its_first_paths() -> None:
    tree = StaticTree([[1], [0], [0, 1], [0, 0], [0, 0, 0]])
    assert first_paths(tree, 4) == ((0,), (1,), (0, 0), (0, 1))
    assert sorted(first_paths(tree, 5)) == sorted(tree.paths)


def test_break_even_is_the_least_rate_that_pays() -> None:
    assert break_even(lambda rate: 1 + rate, 1.5, lambda rate: 1.0) == 0.51
    assert break_even(lambda rate: 1 + rate, 3.0, lambda rate: 1.0) is None


def test_runs_compare_trees_with_chains_and_both_with_plain_rounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    comparison = Comparison()

    def run(tree: str | None, num_drafts: int, seconds: float) -> TreeRun:
        paths = best_tree if tree == "static" else chain_paths
        kind = Kind(tree, [num_drafts], 3 if tree == "static" else None, NO_DRAFTER, paths)
        return comparison.run("llama", kind, 1, 512, num_drafts, seconds)

    runs = [run("plain", 0, 1.0), run(None, 3, 1.5), run("static", 3, 1.5)]
    # At a rate r, the chain emits 1 + r + r**2 + r**3 tokens, the tree 1 + 2 * r.
    assert [each.break_even_rate for each in runs] == [None, 0.35, 0.26]
    assert run("static", 3, 1.8).break_even_rate is None  # the chain is faster at every rate
    rows = table_rows([msgspec.to_builtins(each) for each in runs])
    assert [row[1] for row in rows] == ["plain", "chain", "static"]
    for each in runs:
        progress(each)
    assert "AL 2.5 simulated" in capsys.readouterr().out


def test_trees_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "expected a GPU" in capsys.readouterr().err
