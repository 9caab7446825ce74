"""Settings: what is understood, filled in, translated and refused, in which words."""

import itertools
from typing import Any

import pytest

from vllm_mtp.config import (
    MTPConfig,
    SettingsError,
    TreeShape,
    candidates,
    parse_settings,
)


def shape_of(**settings: object) -> tuple[int, int, int]:
    shape = parse_settings({"method": "mtp_tree", **settings}).config.shape
    return shape.num_steps, shape.topk, shape.num_nodes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (6, 3, 12)),
        ({"shape": "fixed"}, (3, 4, 7)),
        ({"num_speculative_tokens": 3}, (3, 4, 3)),
        ({"num_speculative_tokens": 2}, (2, 4, 2)),
        ({"topk": 1, "num_speculative_tokens": 5}, (5, 1, 5)),
        ({"topk": 1}, (3, 1, 3)),
        ({"num_steps": 1}, (1, 4, 4)),
        ({"num_steps": 1, "topk": 4}, (1, 4, 4)),
        ({"num_steps": 5, "topk": 8, "num_speculative_tokens": 32}, (5, 8, 32)),
        ({"num-steps": 2, "topk": 2}, (2, 2, 6)),
        # A tree of 2 nodes is at most 2 deep.
        ({"num_steps": 4, "topk": 1, "num_speculative_tokens": 2}, (2, 1, 2)),
    ],
)
def test_missing_sizes_fit_the_given_ones(
    settings: dict[str, object], expected: tuple[int, int, int]
) -> None:
    assert shape_of(**settings) == expected


def test_sglang_names_are_translated_and_the_root_discounted() -> None:
    parsed = parse_settings(
        {
            "method": "mtp_tree",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
            "speculative_num_draft_tokens": 8,
        }
    )
    assert parsed.config.shape == TreeShape(3, 4, 7)
    assert parsed.translated["speculative_num_draft_tokens"] == (
        "num_speculative_tokens=7"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topk": 0}, "topk=0 is out of range; use 1 to 32"),
        (
            {"topk": 2, "max_draft_context": 8192},
            "needs the shape that follows the load",
        ),
        ({"shape": "auto", "max_draft_context": 0}, "out of range; use 1 to"),
        ({"topk": 2, "share_nodes": True}, "needs the shape that follows the load"),
        ({"shape": "auto", "share_nodes": 1}, "share_nodes"),
        ({"topk": 2048}, "use 1 to 32"),
        ({"topk": "4"}, "topk='4' must be a whole number from 1 to 32"),
        ({"topk": True}, "must be a whole number"),
        ({"num_steps": 17}, "use 1 to 16"),
        ({"num_speculative_tokens": 64}, "use 1 to 63"),
        (
            {"num_steps": 1, "topk": 4, "num_speculative_tokens": 5},
            "Use num_speculative_tokens from 1 to 4",
        ),
        (
            {"num_steps": 2, "topk": 1, "num_speculative_tokens": 3},
            "from 1 to 2",
        ),
        (
            {"num_steps": 16, "topk": 32},
            "num_steps to at most 3, or frontier or topk to at most 4",
        ),
        ({"topk": 3, "frontier": 0}, "frontier=0 is out of range; use 1 to 3"),
        ({"topk": 3, "frontier": 4}, "frontier=4 is out of range; use 1 to 3"),
        ({"topk": 3, "frontier": -1}, "frontier=-1 is out of range; use 1 to 3"),
        ({"frontier": 5}, "use 1 to 4. It is at most topk=4; raise topk for more."),
        (
            {"shape": "auto", "frontier": 3, "num_speculative_tokens": 2},
            "with topk=3 (for frontier=3) and num_speculative_tokens=2",
        ),
        ({"speculative_frontier": 2}, "did you mean 'frontier'?"),
        ({"topk": 3, "frontier": "2"}, "frontier='2' must be a whole number from 1"),
        ({"topk": 3, "frontier": True}, "frontier=True must be a whole number from 1"),
        ({"topk": 3, "frontier": 1.0}, "frontier=1.0 must be a whole number from 1"),
        ({"shape": "auto", "frontier": 0}, "frontier=0 is out of range"),
        ({"shape": "auto", "frontier": 33}, "frontier=33 is out of range; use 1 to 32"),
        ({"shape": "auto", "topk": 3, "frontier": 4}, "use 1 to 3"),
        ({"shape": "auto", "frontier": True}, "frontier=True must be a whole number"),
        ({"frontir": 2}, "did you mean 'frontier'?"),
        ({"topk": 3, "frontier": 1, "num_speculative_tokens": 10}, "from 1 to 9"),
        (
            {"num_steps": 14, "topk": 32, "frontier": 5},
            "Lower num_steps to at most 13, or frontier or topk to at most 4.",
        ),
        ({"num_step": 3}, "did you mean 'num_steps'?"),
        ({"tok_k": 3}, "did you mean 'topk'?"),
        ({"xyzzy": 3}, "Known settings:"),
        ({"draft_sample_method": "probabilistic"}, "Remove it"),
        ({"rejection_sample_method": "block"}, "Remove it"),
        ({"topk": 4, "speculative_eagle_topk": 4}, "keep topk"),
        ({"speculative_num_draft_tokens": 1}, "use 2 to 64"),
        ({"trace": {"path": "x", "evry": 2}}, "did you mean every?"),
    ],
)
def test_wrong_settings_are_refused_with_the_way_out(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError) as error:
        parse_settings({"method": "mtp_tree", **settings})
    assert words in str(error.value)


def test_vllm_gets_mtp_and_the_keys_that_are_its_own() -> None:
    parsed = parse_settings({"method": "mtp_tree", "model": "/nextn", "topk": 2})
    assert parsed.vllm_config == {
        "method": "mtp",
        "num_speculative_tokens": 7,
        "model": "/nextn",
    }


def test_settings_survive_the_way_to_the_workers() -> None:
    config = parse_settings({"method": "mtp_tree", "trace": "t.jsonl"}).config
    assert MTPConfig.from_dict(config.to_dict()) == config
    for frontier in (1, 2, 3):
        settings = {"method": "mtp_tree", "topk": 3, "frontier": frontier}
        config = parse_settings(settings).config
        assert MTPConfig.from_dict(config.to_dict()) == config
        assert config.shape.frontier == frontier
        assert config.to_dict()["shape"]["frontier"] == frontier


def test_as_many_nodes_are_expanded_as_have_children() -> None:
    """EAGLE-2's own, unless it is given; ``auto`` takes few."""

    def frontier_of(**settings: object) -> int:
        return parse_settings({"method": "mtp_tree", **settings}).config.shape.frontier

    assert TreeShape() == TreeShape(3, 4, 7, 4)
    with pytest.raises(SettingsError, match="frontier=4 is out of range; use 1 to 3"):
        TreeShape(3, 3, 7, 4)
    for topk in (1, 2, 3, 8):
        assert frontier_of(topk=topk) == topk
    assert frontier_of(topk=8, frontier=3) == 3
    for topk in (2, 3, 8):
        assert frontier_of(shape="auto", topk=topk) == 2
    assert frontier_of() == frontier_of(shape="auto") == 2
    assert frontier_of(shape="auto", topk=8, frontier=3) == 3
    assert not parse_settings({"method": "mtp_tree", "frontier": 2}).config.auto


def test_candidates_are_those_that_a_tree_can_have() -> None:
    """Counted node by node."""
    for steps, topk in itertools.product(range(1, 6), range(1, 5)):
        for frontier in range(1, topk + 1):
            expanded = [1] + [frontier] * (steps - 1)
            found = sum(topk for nodes in expanded for _ in range(nodes))
            assert candidates(steps, topk, frontier) == found
            shape = TreeShape(steps, topk, 1, frontier)
            assert shape.num_candidates == found
            assert shape.num_scratch_rows == sum(expanded) - 1


def test_a_narrow_frontier_makes_room_for_depth_and_width() -> None:
    """64 scratch rows: 16 levels of 4 nodes, whatever the number of children."""
    assert TreeShape(16, 32, 63, 4).num_scratch_rows == 60
    with pytest.raises(SettingsError, match="expands 75 nodes per request"):
        TreeShape(16, 32, 63, 5)


def test_every_possible_shape_is_allowed_and_every_other_refused() -> None:
    """The grid of small shapes: N from 1 to the number of candidates, nothing else."""
    for steps in range(1, 5):
        for topk in range(1, 5):
            for frontier in {None, 1, topk - 1 or 1}:
                most = topk + (steps - 1) * (frontier or topk) * topk
                settings = {"method": "mtp_tree", "num_steps": steps, "topk": topk}
                if frontier:
                    settings["frontier"] = frontier
                check_every_number_of_nodes(settings, most)


def check_every_number_of_nodes(settings: dict[str, Any], most: int) -> None:
    for nodes in range(1, 64):
        settings["num_speculative_tokens"] = nodes
        if nodes <= most:
            shape = parse_settings(settings).config.shape
            assert shape.num_steps == min(settings["num_steps"], nodes)
        else:
            with pytest.raises(SettingsError, match=f"from 1 to {most}"):
                parse_settings(settings)
