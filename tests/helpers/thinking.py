"""DeepSeek-R1's reasoning parser with markers that the tiny model knows.

Also a plugin file for ``--reasoning-parser-plugin``: the parser's name is ``marked``.
"""

from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("marked")
class MarkedReasoningParser(DeepSeekR1ReasoningParser):  # type: ignore[misc]
    """Thinking lasts until the token ``end``, which any of the vocabulary can be."""

    start = "<|begin_of_text|>"
    end = "~"

    @property
    def start_token(self) -> str:
        return self.start

    @property
    def end_token(self) -> str:
        return self.end

    def extract_reasoning(
        self, model_output: str, request: Any
    ) -> tuple[str | None, str | None]:
        """An answer without the marker holds no thinking."""
        if self.end not in model_output:
            return None, model_output
        parts: tuple[str | None, str | None]
        parts = super().extract_reasoning(model_output, request)
        return parts
