"""Driving a running OpenAI-compatible server and saying how it did."""
