"""Totals of draft trees in vLLM's metrics, beyond its own ``spec_decode`` counters."""
