"""Triton kernels, their launch choices, and the memory layout they share with everything else. Must not know of caches or models."""
