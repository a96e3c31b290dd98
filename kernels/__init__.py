"""Example kernels, tuned for NVIDIA H200: each with a Python wrapper and a torch reference."""
