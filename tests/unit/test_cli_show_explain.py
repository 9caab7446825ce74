"""``vllm-mtp show`` and ``vllm-mtp explain`` as a user calls them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.helpers.traces import HOSTILE, make_steps, write_trace
from vllm_mtp.auto.ladder import EQUAL, SHARED
from vllm_mtp.buffers import build_tree_buffers
from vllm_mtp.cli import main
from vllm_mtp.config import TreeShape
from vllm_mtp.features import FEATURES, Feature, ServedBy
from vllm_mtp.trace.schema import Step
from vllm_mtp.trace.stats import summarize

MODEL = Path(__file__).parents[2] / "examples" / "tiny_deepseek" / "model"

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "160")
    for command in ("show", "explain"):
        monkeypatch.setitem(main.COMMANDS, command, "")
    return lambda *args: CliRunner().invoke(main.app, [str(arg) for arg in args])


@pytest.fixture
def steps() -> list[Step]:
    return make_steps(30, ("cmpl-alpha", "cmpl-beta"), plain_every=6)


@pytest.fixture
def trace(tmp_path: Path, steps: list[Step]) -> Path:
    return write_trace(tmp_path / "t.jsonl", steps)


# --- show ---------------------------------------------------------------------------


def test_show_draws_the_last_trees_and_says_so(run: Run, trace: Path) -> None:
    result = run("show", trace)
    assert result.exit_code == 0, result.output
    assert result.output.count("root") == 5
    assert "The last 5 of 60 steps" in result.output
    assert "accept length" in result.output


def test_show_selects_request_and_step(run: Run, trace: Path) -> None:
    result = run("show", trace, "--request", "beta", "--step", "7")
    assert result.output.count("step 7  request cmpl-beta") == 1
    assert "alpha" not in result.output
    for row in result.output.splitlines():
        assert not row.startswith("The last")


def test_show_last_takes_one_step_of_each_request(run: Run, trace: Path) -> None:
    result = run("show", trace, "--last")
    assert result.output.count("step 29  request cmpl-") == 2


def test_show_summary_has_figures_only(
    run: Run, trace: Path, steps: list[Step]
) -> None:
    result = run("show", trace, "--summary")
    assert "root" not in result.output
    assert f"{summarize(steps).mean_accept_length:.3f}" in result.output
    assert "60 (10 without drafts)" in result.output


def test_show_json_is_for_machines(run: Run, trace: Path, steps: list[Step]) -> None:
    report = json.loads(run("show", trace, "--json").output)
    assert len(report["steps"]) == 60
    first = report["steps"][0]
    assert first["emitted"] == [first["drawn"][row] for row in first["path"]]
    assert report["summary"]["mean_accept_length"] == pytest.approx(
        1 + report["summary"]["accepted"] / report["summary"]["drafted_steps"]
    )
    short = json.loads(run("show", trace, "--json", "--summary").output)
    assert short["steps"] == []
    assert short["summary"] == report["summary"]


def test_show_html_writes_a_page(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = run("show", trace, "--html", out)
    assert "60 steps" in result.output
    assert out.read_text().startswith("<!doctype html>")
    result = run("show", trace, "--html", tmp_path / "no" / "page.html")
    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_show_adds_text_from_a_tokenizer(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    bare = [replace(step, texts={}) for step in make_steps(3)]
    trace = write_trace(tmp_path / "t.jsonl", bare)
    without = run("show", trace, "--last").output
    with_text = run("show", trace, "--last", "--tokenizer", MODEL).output
    assert without != with_text
    assert run("show", trace, "--tokenizer", tmp_path / "no").exit_code == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--request", "gamma"],
            "No request matches 'gamma'; choose one of: cmpl-alpha",
        ),
        (["--request", "cmpl"], "Several requests match 'cmpl'"),
        (["--step", "99"], "No step 99 in the trace; recorded: 0 to 29"),
    ],
)
def test_show_names_what_there_is(
    run: Run, trace: Path, args: list[str], message: str
) -> None:
    result = run("show", trace, *args)
    assert result.exit_code == 1
    assert message in result.output


def test_show_refuses_a_corrupt_trace_with_its_line(run: Run, trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"kind":"step"}\n')
    result = run("show", trace)
    assert result.exit_code == 1
    assert ":62: request is missing" in "".join(result.output.splitlines())
    assert "Traceback" not in result.output


def test_show_lets_no_control_character_through(run: Run, tmp_path: Path) -> None:
    steps = make_steps(10, ("\x1b]0;evil\x07",), texts=HOSTILE)
    trace = write_trace(tmp_path / "t.jsonl", steps, model="\x1b[2J")
    for args in (["--limit", "99"], ["--request", "\x1bx"]):
        output = run("show", trace, *args).output
        assert not any(char in output for char in "\x1b\x07\x00\u202e\u2028")


# --- explain ------------------------------------------------------------------------


def explain(run: Run, *args: object, settings: Any = None) -> dict[str, Any]:
    if settings is not None:
        args = (*args, "--speculative-config", json.dumps(settings))
    result = run("explain", "--json", *args)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.output)
    return report


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 7), (5, 8, 32), (4, 2, 12)])
def test_explain_counts_the_tree(run: Run, shape: tuple[int, int, int]) -> None:
    steps, topk, nodes = shape
    names = ("num_steps", "topk", "num_speculative_tokens")
    tree = explain(run, settings=dict(zip(names, shape, strict=True)))["tree"]
    assert (tree["depth"], tree["branching"]) == (steps, topk)
    assert tree["candidates"] == topk + (steps - 1) * topk**2
    assert (tree["nodes_verified"], tree["rows_with_root"]) == (nodes, nodes + 1)
    assert tree["frontier"] == topk


@pytest.mark.parametrize("frontier", [1, 2])
def test_explain_shows_the_frontier(run: Run, frontier: int) -> None:
    settings = {"num_steps": 6, "topk": 3, "frontier": frontier}
    sizes = ("--max-num-seqs", 5, "--max-num-batched-tokens", 77)
    report = explain(run, *sizes, settings=settings)
    assert report["settings"]["frontier"] == report["tree"]["frontier"] == frontier
    assert report["tree"]["candidates"] == 3 + 5 * frontier * 3
    shown = {buffer["name"]: buffer["shape"] for buffer in report["buffers"]}
    assert shown["level_slots"] == [5, 5 * frontier]
    assert shown["topk_ids"] == [5 * frontier, 3]
    text = run("explain", "--speculative-config", json.dumps(settings)).output
    text = " ".join(text.split())
    assert f"frontier {frontier} nodes expanded per level" in text
    assert f"3 + 5 x {frontier} x 3" in text


def test_explain_lists_the_slots_of_every_frontier(run: Run) -> None:
    report = explain(run, "--max-num-seqs", 5, settings={"shape": "auto"})
    slots = [b["shape"] for b in report["buffers"] if b["name"] == "level_slots"]
    assert slots == [[5, 5], [5, 10]]
    assert report["buffer_bytes"] == sum(b["nbytes"] for b in report["buffers"])


def test_explain_counts_the_very_buffers_of_the_worker(run: Run) -> None:
    report = explain(
        run, "--max-num-seqs", 5, "--max-num-batched-tokens", 77, settings={"topk": 3}
    )
    real = build_tree_buffers(TreeShape(3, 3, 7), 5, 77, torch.device("cpu"))
    shown = {buffer["name"]: buffer for buffer in report["buffers"]}
    for name, tensor in vars(real).items():
        if isinstance(tensor, torch.Tensor):
            assert tuple(shown[name]["shape"]) == tuple(tensor.shape)
            assert shown[name]["nbytes"] == tensor.numel() * tensor.element_size()
    assert report["buffer_bytes"] == sum(b["nbytes"] for b in report["buffers"])


def test_explain_translates_sglang_names(run: Run) -> None:
    """SGLang's 8 draft tokens are the root and 7 nodes."""
    theirs = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    report = explain(run, settings={"method": "mtp_tree", **theirs})
    assert report["settings"]["num_speculative_tokens"] == 7
    assert report["translated"].keys() == report["sglang"].keys()
    assert report["sglang"] == theirs
    text = run("explain", "--speculative-config", json.dumps(theirs)).output
    assert "-> num_speculative_tokens=7 (without the root)" in text


def test_explain_reads_a_model_without_weights(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    fixed = ("--speculative-config", '{"shape": "fixed"}')
    report = explain(run, tmp_path, "--max-num-seqs", "16", *fixed)
    assert report["model"]["num_mtp_layers"] == 1
    # 16 requests x 8 expanded nodes in blocks of 64, latent 512 + 64, bf16
    assert report["scratch_kv"]["nbytes"] == 2 * 64 * 576 * 2
    report = explain(run, tmp_path, "--kv-cache-dtype", "float32")
    assert report["scratch_kv"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "has no MTP layer"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_explain_says_why_a_model_is_refused(
    run: Run, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("explain", tmp_path)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "candidates" in result.output


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000])
def test_explain_refuses_a_broken_config(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    result = run("explain", tmp_path)
    assert result.exit_code == 1
    assert "cannot be read (no JSON" in " ".join(result.output.split())


def test_explain_tells_shared_sizes_from_equal_ones(run: Run) -> None:
    shares = json.dumps({"shape": "auto", "share_nodes": True})
    text = run("explain", "--speculative-config", shares).output
    text = " ".join(text.split())
    equal = ", ".join(f"{nodes} ({steps})" for nodes, steps, _ in EQUAL)
    assert f"(in so many levels): {equal}." in text
    assert "From 32 requests on" in text
    shared = [f"{nodes} of {drafts} ({steps})" for nodes, steps, drafts in SHARED]
    assert f"{', '.join(shared)}." in text
    shape = {"shape": "auto", "num_steps": 2, "topk": 2, "num_speculative_tokens": 6}
    small = run("explain", "--speculative-config", json.dumps(shape)).output
    equal = [f"{n} ({min(steps, 2)})" for n, steps, _ in EQUAL if n < 6]
    assert f"{', '.join(equal)}, 6 (2)." in " ".join(small.split())
    assert "requests on" not in " ".join(small.split())
    assert "requests on" not in " ".join(run("explain").output.split())


def test_explain_says_when_a_draft_level_does_not_fit(run: Run) -> None:
    sizes = ("--max-num-seqs", "100", "--max-num-batched-tokens", "399")
    result = run("explain", *sizes, "--speculative-config", '{"topk": 4}')
    assert result.exit_code == 1
    assert "draft level of 400 rows" in " ".join(result.output.split())
    narrow = '{"topk": 4, "frontier": 3}'
    assert run("explain", *sizes, "--speculative-config", narrow).exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", "[1]"], "must be a JSON object"),
        (["--speculative-config", '{"method": "mtp"}'], "only 'mtp_tree'"),
        (["--speculative-config", '{"topkk": 2}'], "did you mean 'topk'"),
        (["--speculative-config", '{"topk": 99}'], "use 1 to 32"),
        (["/no/such/folder"], "cannot be read"),
        ([MODEL, "--kv-cache-dtype", "int3"], "'int3' is not known here"),
    ],
)
def test_explain_refuses_in_one_sentence(
    run: Run, args: list[Any], message: str
) -> None:
    result = run("explain", *args)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "feature", [f for f in FEATURES if f.example], ids=lambda f: f.name
)
def test_feature_table_says_what_the_engine_does(feature: Feature) -> None:
    """Each sampling parameter of a line alone decides as the line says."""
    sampling = pytest.importorskip("vllm.sampling_params")
    requests = pytest.importorskip("vllm_mtp.requests")
    for name, value in feature.example.items():
        if name == "structured_outputs":
            value = sampling.StructuredOutputsParams(**value)
        if name == "repetition_detection":
            value = sampling.RepetitionDetectionParams(**value)
        params = sampling.SamplingParams(**{name: value})
        chain = feature.served_by is ServedBy.CHAIN
        assert requests.needs_chain(params) is chain, name


NOT_DRAFTED_FOR = {
    # How the answer is written.
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "output_text_buffer_length"),
    *("stream_interval", "flat_logprobs", "skip_clone"),
    # What is read or kept besides the tokens.
    *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
    # For logits processors of others, which have a line.
    "extra_args",
    # Of engines that are refused at start-up.
    *("watermarking", "trace_decode_token_ids"),
}


def test_every_sampling_parameter_has_a_line() -> None:
    """Catches: a new parameter of vLLM that nobody has thought about."""
    sampling = pytest.importorskip("vllm.sampling_params")
    fields = {f for f in sampling.SamplingParams.__struct_fields__ if f[0] != "_"}
    listed = {name for feature in FEATURES for name in feature.example}
    assert fields - listed - NOT_DRAFTED_FOR == set()
    assert listed <= fields
