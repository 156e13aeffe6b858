"""Fused kernels: DyT, DyISRU and Derf, forward and backward, in one pass over memory each."""
