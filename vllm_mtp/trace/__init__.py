"""The draft tree made visible: a JSON-lines trace, its writer and its viewers.

Nothing here imports torch or vLLM, so a trace can be read anywhere.
"""
