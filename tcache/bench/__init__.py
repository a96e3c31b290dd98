"""``tcache bench``: a library's kernels against torch and against what the machine can do."""
