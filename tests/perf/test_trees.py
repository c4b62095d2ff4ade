"""Chains against trees: the trees that are chosen, what they emit on average, and when they pay."""

from __future__ import annotations

import pytest

from drift_sdk import StaticTree
from perf.trees import best_tree, break_even, chain_paths, first_paths, main, tokens_of_tree


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


def test_trees_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "expected a GPU" in capsys.readouterr().err
