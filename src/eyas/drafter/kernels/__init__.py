"""Triton kernels for the work between matrix products, and what launches them.

Only imported where `eyas.drafter.ops` finds a CUDA tensor in half precision: Triton comes with torch's CUDA builds and
is no dependency elsewhere. Every kernel computes in fp32 and rounds once. Beside each stands its plain form, in ops.py
or attention.py, that tests compare it with.
"""
