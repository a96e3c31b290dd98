"""Identities: GPU, shape key, config, kernel source. Each prints as text that parses back."""

from tcache.keys.config import config_key, config_options, space_identity
from tcache.keys.gpu import GPU, Target, catalogue, find_gpu
from tcache.keys.shape import ShapeKey, ranked

__all__ = [
    "GPU",
    "ShapeKey",
    "Target",
    "catalogue",
    "config_key",
    "config_options",
    "find_gpu",
    "ranked",
    "space_identity",
]
