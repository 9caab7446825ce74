"""The documents are true: links, code blocks, options, seams and generated sections."""

import ast
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import report
from vllm_mtp import config
from vllm_mtp.auto.ladder import build_ladder
from vllm_mtp.cli import main
from vllm_mtp.features import FEATURES
from vllm_mtp.tree.layout import EXAMPLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "vllm_mtp"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
TEXTS = {path: path.read_text("utf-8") for path in DOCUMENTS}

BLOCK = re.compile(r"(<!-- run -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    place: str
    language: str
    code: str
    runs: bool


def find_blocks(*languages: str) -> list[Any]:
    """Blocks of these languages as parameters, named by file and line."""
    found = []
    for path, text in TEXTS.items():
        for match in BLOCK.finditer(text):
            if match[2] not in languages:
                continue
            line = text.count("\n", 0, match.start()) + 1
            place = f"{path.name}:{line}"
            block = Block(place, match[2], match[3], match[1] is not None)
            found.append(pytest.param(block, id=place))
    return found


def by_document() -> Any:
    return pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def read_doc(name: str) -> str:
    return TEXTS[DOCS / f"{name}.md"]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


# --- links and names ------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    without_code = BLOCK.sub("", text)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


@by_document()
def test_relative_links_resolve(path: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", TEXTS[path]))
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    for target in local:
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{target}: no heading"


@by_document()
def test_named_files_exist(path: Path) -> None:
    """`tests/...`, `docs/...` and so on in running text; results may be to come."""
    folders = "vllm_mtp|tests|docs|benchmarks|examples"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", TEXTS[path]):
        if not name.startswith("benchmarks/results/"):
            assert (ROOT / name).exists(), f"{name}: no such file"


@by_document()
def test_make_targets_exist(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([\w-]+)", TEXTS[path], re.MULTILINE):
        assert target in targets


def definitions(path: Path) -> set[str]:
    """``function`` and ``Class.method`` of a module."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_hops_of_the_structure_exist() -> None:
    hops = re.findall(r"`(vllm_mtp/[\w/]+\.py):([\w.]+)`", read_doc("structure"))
    assert len(hops) > 30
    for file, name in hops:
        assert name in definitions(ROOT / file), f"{file} has no {name}"


def test_a_request_lives_in_eight_steps() -> None:
    body = read_doc("structure").split("## A request's life in eight steps")[1]
    steps = re.findall(r"^(\d)\. \*\*", body, re.MULTILINE)
    assert steps == list("12345678")


# --- code blocks ----------------------------------------------------------------------


@pytest.mark.parametrize("block", find_blocks("python"))
def test_python_block(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(block.code, block.place, "exec")
    if block.runs:
        monkeypatch.chdir(ROOT)
        exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("block", find_blocks("json"))
def test_json_block_is_a_setting(block: Block) -> None:
    config.parse_settings(json.loads(block.code))


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, comments left out."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.mark.parametrize("block", find_blocks("bash"))
def test_bash_block(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.code, text=True, check=False)
    assert checked.returncode == 0
    for words in commands(block):
        check_speculative_config(words)
        check_module(words)
        if words[0] == "vllm-mtp":
            check_own_command(words[1:])
        if block.runs:
            assert words[0] == "vllm-mtp", "only these are cheap enough to run"
            monkeypatch.chdir(ROOT)
            result = CliRunner().invoke(main.app, words[1:])
            assert result.exit_code == 0, result.output


def check_speculative_config(words: list[str]) -> None:
    for option, value in itertools.pairwise(words):
        if option == "--speculative-config":
            settings = json.loads(value)
            if settings.get("method", config.METHOD) == config.METHOD:
                config.parse_settings(settings)


def check_module(words: list[str]) -> None:
    """``python -m benchmarks.x`` and ``python benchmarks/x.py`` name files."""
    if "python" not in words[0]:
        return
    if words[1] == "-m" and words[2].startswith("benchmarks."):
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), words
    if words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), words


def check_own_command(words: list[str]) -> None:
    """The command exists and has the options."""
    assert words[0] in main.COMMANDS
    command = main.LazyCommand(name=words[0]).load()
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


# --- settings -------------------------------------------------------------------------


def option_rows() -> dict[str, list[str]]:
    """First row of configuration.md's tables for each key in a first cell."""
    rows = {}
    for line in read_doc("configuration").splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for key in re.findall(r"`([\w-]+)`", cells[0]):
                rows.setdefault(key, cells)
    return rows


def test_every_key_is_documented() -> None:
    keys = {*config.OWN_KEYS, *config.PASSED_KEYS, *config.FIXED_KEYS}
    assert keys | set(config.SGLANG_NAMES) <= option_rows().keys()


def test_defaults_and_ranges_are_those_of_the_code() -> None:
    rows, shape = option_rows(), config.TreeShape()
    for key, default, most in (
        ("num_steps", shape.num_steps, config.MAX_STEPS),
        ("topk", shape.topk, config.MAX_TOPK),
        ("num_speculative_tokens", shape.num_nodes, config.MAX_ROWS - 1),
    ):
        assert rows[key][1] == str(default)
        assert rows[key][2].startswith(f"1 to {most} ")
    assert rows["frontier"][1].startswith("`topk`")
    assert rows["frontier"][2].startswith("1 to `topk` ")


def test_keys_with_one_meaning_show_it() -> None:
    rows = option_rows()
    words = {"standard": "`standard`", "greedy": "`greedy`", False: "false"}
    for key, (allowed, _) in config.FIXED_KEYS.items():
        assert rows[key][1] == words.get(allowed, "none"), key


def test_log_lines_are_those_of_the_code() -> None:
    default = config.parse_settings({"method": "mtp_tree"}).config
    assert f"mtp_tree: {default.describe()}\n" in TEXTS[ROOT / "README.md"]
    (setting,) = re.findall(r'^\{.*"speculative_num_steps".*\}$', *_configuration())
    translated = config.parse_settings(json.loads(setting)).translated
    line = "; ".join(f"{k} -> {v}" for k, v in translated.items())
    assert f"mtp_tree: understood {line}\n" in read_doc("configuration")


def test_sizes_of_auto_are_those_of_the_code() -> None:
    largest = config.parse_settings({"method": "mtp_tree"}).config.shape
    ladder = build_ladder(largest, may_share=True)
    # Equal ones first, as they stand there.
    rungs = sorted(ladder, key=lambda rung: rung.is_shared)
    for name, values in (
        ("nodes N a request", [rung.num_nodes for rung in rungs]),
        ("drafted, and verified at most", [rung.num_drafts for rung in rungs]),
        ("depth S", ["-", *(rung.num_steps for rung in rungs[1:])]),
        ("frontier F", ["-", *(rung.frontier for rung in rungs[1:])]),
    ):
        row = " | ".join(map(str, [name, *values]))
        assert f"| {row} |" in read_doc("load")
    sizes = f"{largest.num_steps}, {largest.topk}, {largest.num_nodes} and "
    for page in ("load", "configuration"):
        assert f"they are {sizes}{largest.frontier}" in read_doc(page)


def _configuration() -> tuple[str, re.RegexFlag]:
    return read_doc("configuration"), re.MULTILINE


def test_feature_table_is_that_of_the_code() -> None:
    text = read_doc("configuration")
    for feature in FEATURES:
        row = f"| {feature.name} | {feature.served_by} | {feature.why} |"
        assert row in text, feature.name


# --- tree, seams, refusals, kernels ---------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "parents", "depths", "masks"])
def test_printed_tensors_are_those_of_the_example(name: str) -> None:
    (line,) = re.findall(rf"^{name} +([-\d ]+)$", read_doc("tree"), re.MULTILINE)
    assert tuple(map(int, line.split())) == getattr(EXAMPLE, name)


def test_every_seam_is_documented() -> None:
    seams = {name for name in definitions(PACKAGE / "compat.py") if name[0] != "_"}
    text = read_doc("compatibility").split("### Seams")[1]
    assert {name for name in seams if f"`{name}`" not in text} == set()


def names_of_the_runner() -> dict[str, set[str]]:
    """Module -> what it imports from vLLM's workers, which promise nothing."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("vllm.v1.worker"):
                names = found.setdefault(path.relative_to(PACKAGE).as_posix(), set())
                names |= {alias.name for alias in node.names}
    found.pop("compat.py")
    return found


def test_private_names_are_documented_or_in_compat() -> None:
    text = read_doc("compatibility").split("### Seams")[1]
    for module, names in names_of_the_runner().items():
        (row,) = (r for r in text.splitlines() if r.startswith(f"| [`{module}`]"))
        assert {name for name in names if f"`{name}`" not in row} == set(), module


def test_every_backend_is_documented() -> None:
    source = (PACKAGE / "attention" / "base.py").read_text()
    backends = re.findall(r'^    "([A-Z_]+)": "vllm_mtp\.', source, re.MULTILINE)
    assert len(backends) >= 5
    for backend in backends:
        assert f"| `{backend}` |" in read_doc("compatibility")


def test_every_refused_feature_is_documented() -> None:
    """The keys and names that the checks of startup.py go through."""
    names = set()
    for node in tree_of(PACKAGE / "startup.py").body:
        if getattr(node, "name", "") in ("check_parallel", "check_features"):
            for part in ast.walk(node):
                if isinstance(part, ast.Dict):
                    names |= {key.value for key in part.keys}  # type: ignore
                elif isinstance(part, ast.For) and isinstance(part.iter, ast.Tuple):
                    names |= {item.value for item in part.iter.elts}  # type: ignore
    assert len(names) >= 8
    text = read_doc("compatibility").split("## Refused at start-up")[1]
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_kernel_is_documented() -> None:
    kernels = {
        name
        for path in (PACKAGE / "kernels").glob("*.py")
        for name in definitions(path)
        if name.endswith("_kernel")
    }
    assert len(kernels) >= 15
    text = read_doc("kernels")
    assert {name for name in kernels if f"`{name}`" not in text} == set()


# --- generated sections ---------------------------------------------------------------


def test_generated_sections_are_up_to_date() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in report.outdated()]
    assert not names, "out of date; run: python -m benchmarks.report"


def test_every_section_is_used() -> None:
    used = {
        f"{k}:{n}" for text in TEXTS.values() for k, n in report.MARKER.findall(text)
    }
    assert used == report.SECTIONS.keys()


def test_an_unknown_section_is_an_error() -> None:
    with pytest.raises(KeyError, match="results:nothing"):
        report.fill("<!-- results:nothing -->\nx\n<!-- /results -->")


@pytest.mark.parametrize(
    "make",
    [
        report.summarize_serving,
        report.summarize_acceptance,
        report.summarize_attention,
        report.summarize_bookkeeping,
        report.serving_losses,
        report.attention_losses,
        report.acceptance_losses,
        report.bookkeeping_losses,
    ],
)
def test_what_is_missing_is_said(make: Callable[[None], Any]) -> None:
    assert report.NOT_MEASURED in str(make(None))


def serving_row(batch: int, tree: float | None = None) -> dict[str, Any]:
    row = {"temperature": 0.0, "input_len": 1024, "batch": batch, "off_tok_s": 100.0}
    if tree is not None:
        row |= {"chain": "3", "chain_tok_s": 180.0, "chain_accept_length": 2.5}
        row |= {"tree": "3,4,7", "tree_tok_s": tree, "tree_accept_length": 3.0}
    return row


def test_serving_shows_gains_and_losses() -> None:
    rows = [serving_row(1, 200.0), serving_row(64, 90.0), serving_row(128)]
    record = {"rows": rows}
    against_off, against_chain = report.summarize_serving(record)
    assert against_off["measured"] == "1: 2.00x, 64: 0.90x"
    assert against_chain["measured"] == "1: 1.11x, 64: 0.50x"
    lost_to_off, lost_to_chain = report.serving_losses(record)
    assert "in 1 of 2 settings: batch 64, input 1024, T = 0: 0.90x." in lost_to_off
    assert "in 1 of 2 settings: batch 64, input 1024, T = 0: 0.50x." in lost_to_chain
    table = report.serving_table(record).splitlines()
    assert table[2].endswith("| 3,4,7 | 200 | 3 | 2.00x | 1.11x |")
    assert table[4].count("| -") == 8


def test_acceptance_compares_with_the_best_chain() -> None:
    values = {
        ("chain_greedy", 3): 2.0,
        ("chain_probabilistic", 3): 2.5,
        ("chain_coupled", 3): 2.4,
        ("tree_coupled", 7): 3.0,
    }
    rows = [
        {"temperature": 1.0, "method": method, "nodes": nodes, "accept_length": value}
        for (method, nodes), value in values.items()
    ]
    record = {"rows": rows, "prompts": 32, "tokens": 128}
    (line,) = report.summarize_acceptance(record)
    assert line["measured"] == "2.5, 3 (1.20x)"
    (loss,) = report.acceptance_losses(record)
    assert "accept length 2.4" in loss
    assert "| `tree_coupled` | 7 | 3 |" in report.acceptance_table(record)


def test_attention_names_its_worst_ratio() -> None:
    rows = [
        {"batch": b, "context": c, "heads": 16, "rows": n, "ours_us": ours}
        | {"fa3_chain_us": 10.0, "one_row_us": 8.0}
        for b, c, n, ours in ((16, 12288, 1, 30.0), (16, 12288, 8, 11.0))
    ]
    (line,) = report.summarize_attention({"rows": rows})
    assert line["measured"] == "11 µs, 10 µs (1.10x)"
    ratio, width = report.attention_losses({"rows": rows})
    assert "up to 1.10x" in ratio
    assert "up to 1.38x" in width


# --- captures -------------------------------------------------------------------------


def test_captures_are_those_that_are_made() -> None:
    """Every part is filled by `make captures`, and holds something."""
    source = (DOCS / "captures.py").read_text()
    found = [
        (name, body)
        for text in TEXTS.values()
        for name, body in re.findall(
            r"<!-- capture:(\w+) -->\n```text\n(.*?)```\n<!-- /capture -->",
            text,
            re.DOTALL,
        )
    ]
    assert len(found) == sum(text.count("<!-- capture:") for text in TEXTS.values()) > 3
    for name, body in found:
        assert f'"{name}": ' in source
        assert body.strip()
