"""Oracles in NumPy, named like the kernels that they check; they share no code with them."""
