"""Settings: what is understood, filled in, translated and refused, in which words."""

import pytest

from vllm_mtp.config import MTPConfig, SettingsError, TreeShape, parse_settings


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


def test_every_possible_shape_is_allowed_and_every_other_refused() -> None:
    """The grid of small shapes: N from 1 to the number of candidates, nothing else."""
    for steps in range(1, 5):
        for topk in range(1, 5):
            most = topk + (steps - 1) * topk**2
            for nodes in range(1, 64):
                settings = {"method": "mtp_tree", "num_steps": steps, "topk": topk}
                settings["num_speculative_tokens"] = nodes
                if nodes <= most:
                    shape = parse_settings(settings).config.shape
                    assert shape.num_steps == min(steps, nodes)
                else:
                    with pytest.raises(SettingsError, match=f"from 1 to {most}"):
                        parse_settings(settings)
