"""Settings of the trace, as they stand in ``--speculative-config``."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_mtp.config import SettingsError

MIN_BYTES = 1 << 16


@dataclass(frozen=True)
class TraceSettings:
    """``{"trace": "FILE"}``, or ``{"trace": {"path": "FILE", ...}}`` for the rest."""

    path: str
    """File to write; the part before the last rotation is kept as ``FILE.1``."""

    every: int = 1
    """Record every n-th verify pass."""

    max_requests: int = 8
    """Requests followed at the same time; when one ends, the next takes its place."""

    max_bytes: int = 64 << 20
    """Bytes both parts together may take. At half of it the file is rotated, so the
    newest steps are always there."""

    text: bool = True
    """Write the text of tokens beside their ids."""

    prompt_text: bool = False
    """Also write the prompts of the followed requests."""

    queue_size: int = 256
    """Passes waiting for the disk; when it is full, passes are dropped and counted."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise SettingsError(
                f"mtp_tree: trace needs a file name, found {self.path!r}."
            )
        for name, low in (
            ("every", 1),
            ("max_requests", 1),
            ("max_bytes", MIN_BYTES),
            ("queue_size", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise SettingsError(
                    f"mtp_tree: trace {name}={value!r} must be a whole number, "
                    f"{low} or more."
                )
        for name in ("text", "prompt_text"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(
                    f"mtp_tree: trace {name}={getattr(self, name)!r} must be true or "
                    "false."
                )

    @classmethod
    def parse(cls, value: object) -> "TraceSettings":
        """Settings from a file name or an object.

        Raises:
            SettingsError: a key is unknown or a value out of range.
        """
        if isinstance(value, str | Path):
            return cls(path=str(value))
        if not isinstance(value, Mapping):
            raise SettingsError(
                f"mtp_tree: trace={value!r} must be a file name or an object with "
                "the key path."
            )
        known = [f.name for f in fields(cls)]
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SettingsError(
                    f"mtp_tree: trace has no setting {key!r}{hint} Known: "
                    f"{', '.join(known)}."
                )
        if "path" not in value:
            raise SettingsError("mtp_tree: trace needs the key path, a file name.")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, which ``parse`` reads back."""
        return asdict(self)
