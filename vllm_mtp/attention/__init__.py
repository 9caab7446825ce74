"""Tree-aware subclasses of vLLM's MLA attention backends."""
