"""DeepSeek MTP layers on disk: what they hold, and copies of them as NextN folders.

Everything here reads headers and bytes only: no torch, no vLLM, no pickle.
"""
