"""Names of configurations: ``off``, ``chain:3``, ``tree:3,4,7``, ``auto``, ..."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_mtp.auto.ladder import MAX_GRAPH_ROWS, build_ladder
from vllm_mtp.config import METHOD, TreeShape, parse_settings


@dataclass(frozen=True)
class Shape:
    """One way to speculate, or none."""

    name: str
    family: str
    """``off``, ``chain`` (vLLM's in-tree ``mtp``), ``tree`` (``mtp_tree``), ``auto``
    (``mtp_tree`` whose shape follows the load) or ``shared`` (and whose large batches
    may share their nodes)."""

    num_steps: int
    topk: int
    num_nodes: int
    frontier: int
    speculative: dict[str, Any] | None

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """Understand ``off``, ``auto``, ``auto:shared``, ``chain:N``,
        ``chain:N:probabilistic``, ``tree:S,k,N`` and ``tree:S,k,N,F``.

        Raises:
            ValueError: for anything else.
        """
        family, *rest = name.split(":")
        speculative: dict[str, Any]
        if family == "off" and not rest:
            return cls(name, family, 0, 1, 0, 1, None)
        if family == "auto" and rest in ([], ["shared"]):
            speculative = {"method": METHOD, "shape": "auto"}
            if rest:
                family, speculative["share_nodes"] = "shared", True
            largest = parse_settings(speculative).config.shape
            return cls(
                name,
                family,
                largest.num_steps,
                largest.topk,
                largest.num_nodes,
                largest.frontier,
                speculative,
            )
        is_chain = family == "chain" and rest and rest[0].isdecimal()
        if is_chain and int(rest[0]) > 0 and rest[1:] in ([], ["probabilistic"]):
            nodes = int(rest[0])
            speculative = {"method": "mtp", "num_speculative_tokens": nodes}
            if rest[1:]:
                speculative["draft_sample_method"] = rest[1]
            return cls(name, family, nodes, 1, nodes, 1, speculative)
        if family == "tree" and len(rest) == 1 and rest[0].count(",") in (2, 3):
            steps, topk, nodes, *given = map(int, rest[0].split(","))
            speculative = {
                "method": "mtp_tree",
                "num_steps": steps,
                "topk": topk,
                "num_speculative_tokens": nodes,
            }
            frontier = topk
            if given:
                speculative["frontier"] = frontier = given[0]
            return cls(name, family, steps, topk, nodes, frontier, speculative)
        raise ValueError(
            f"{name!r} is no configuration; use off, auto, auto:shared, chain:N, "
            "chain:N:probabilistic or tree:STEPS,TOPK,NODES[,FRONTIER]"
        )

    @property
    def num_rows(self) -> int:
        """Rows of a request in a verify pass."""
        return self.num_nodes + 1

    @property
    def is_auto(self) -> bool:
        """Whether the shape follows the load."""
        return self.family in ("auto", "shared")

    def serves(self, temperature: float) -> bool:
        """Whether it makes a difference to measure it at this temperature."""
        return temperature > 0 or "probabilistic" not in self.name

    def capture_sizes(self, batches: Sequence[int]) -> list[int]:
        """Numbers of tokens whose graphs fit these batches without padding.

        Verify passes have ``num_rows`` a request, a tree's draft levels ``frontier``,
        a chain's one.
        """
        rows, most = {self.num_rows, self.frontier}, max(batches) * self.num_rows
        if self.is_auto:
            largest = TreeShape(
                self.num_steps, self.topk, self.num_nodes, self.frontier
            )
            ladder = build_ladder(largest)
            rows |= {rung.num_nodes + 1 for rung in ladder}
            rows |= {rung.frontier for rung in ladder}
            most = MAX_GRAPH_ROWS
        sizes = {batch * n for batch in batches for n in rows}
        return sorted(size for size in sizes if size <= most)
