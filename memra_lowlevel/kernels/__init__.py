"""Typed launches of the kernels in ``cuda_src``, one module per family."""
