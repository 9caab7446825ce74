"""The comparison of equal trees with one budget for the batch."""

from types import SimpleNamespace
from typing import Any

from benchmarks.shared_budget import accepted, compare, share


def step(scores: list[float], path: list[int]) -> Any:
    return SimpleNamespace(scores=(0.0, *scores), path=(0, *path))


SURE = step([-0.1, -0.2, -0.3, -0.4], [1, 2, 3, 4])
UNSURE = step([-1.0, -2.0, -3.0, -4.0], [2])


def test_a_front_of_the_rows_is_kept() -> None:
    assert [accepted(SURE, kept) for kept in (0, 1, 3, 9)] == [0, 1, 3, 4]
    assert [accepted(UNSURE, kept) for kept in (0, 1, 2)] == [0, 0, 1]


def test_the_best_nodes_of_all_share_the_budget() -> None:
    assert share([SURE, UNSURE], 4) == [4, 0]
    assert share([SURE, UNSURE], 6) == [4, 2]
    assert share([SURE, UNSURE], 99) == [4, 4]


def test_a_shared_budget_accepts_more_of_a_mixed_batch() -> None:
    row = compare([SURE, UNSURE], 8, 2)
    assert row["equal"] < row["shared"] <= 3.5
    assert row["gain"] > 1.1
    alone = compare([SURE], 8, 2)
    assert alone["equal"] == alone["shared"] == 3
