"""What a packed draft tree is: its tensors, its invariants, one drawn example.

A *row* is one query row of a request's verify pass. Row 0 is the root, the last
sampled token, which is already certain; rows 1..N are the drafted nodes, sorted by
falling score. A child never scores above its parent and ties keep the lower index
first, so a parent always comes before its children and **any prefix of the rows is
itself a valid tree**: whoever shortens a tree just keeps fewer rows.

Four tensors describe it, each ``[num_rows]`` for one request:

* ``tokens``  int64  token id of the row (row 0: the root)
* ``parents`` int32  row of the parent; ``-1`` for the root and for padding
* ``depths``  int32  number of edges to the root; the model sees RoPE position
  ``root position + depth``
* ``masks``   int64  bit ``j`` is set when the row attends to row ``j``, itself and
  the root included, so a tree holds at most 64 rows

The example used in the docs and the tests, ``EXAMPLE``::

    row 0  root
    |- row 1  "a"          depth 1
    |  |- row 3  "d"       depth 2
    |  |  `- row 6  "g"    depth 3
    |  `- row 4  "e"       depth 2
    `- row 2  "b"          depth 1
       `- row 5  "f"       depth 2
"""

from dataclasses import dataclass

MAX_ROWS = 64
"""Rows of one tree, root included: ancestor sets are the bits of one int64."""

NO_PARENT = -1
"""Parent of the root and of padding rows, which can never be accepted."""


@dataclass(frozen=True)
class PackedTree:
    """A packed tree of one request, on the host; see the module docstring."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Edges to the root, per row; padding rows count as depth 1."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(1 if parent == NO_PARENT else depths[parent] + 1)
        return tuple(depths)

    @property
    def masks(self) -> tuple[int, ...]:
        """Ancestor bits per row, itself and the root included."""
        masks = [1]
        for row, parent in enumerate(self.parents[1:], start=1):
            masks.append((masks[max(parent, 0)]) | (1 << row))
        return tuple(masks)


EXAMPLE = PackedTree(
    tokens=(100, 101, 102, 103, 104, 105, 106), parents=(-1, 0, 0, 1, 1, 2, 3)
)
"""The seven-row example drawn in the module docstring."""
