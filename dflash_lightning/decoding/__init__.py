"""Decoding: who proposes tokens, and the greedy loop that verifies them."""
