"""Tensors in, tensors out: one op a file, each beside the reference that defines it."""
