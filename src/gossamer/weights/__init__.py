"""Compressed formats of one weight matrix, and linear layers that multiply without unpacking it."""
