"""Shape manifests: which launches to replay."""

from tcache.manifest.arguments import Constant, Constexpr, Descriptor, DType, ListArgument, Tensor, TupleArgument
from tcache.manifest.load import Case, LoadedManifest, examine, load_manifest
from tcache.manifest.model import CallItem, KernelItem, LaunchesItem, Manifest

__all__ = [
    "CallItem",
    "Case",
    "Constant",
    "Constexpr",
    "DType",
    "Descriptor",
    "KernelItem",
    "LaunchesItem",
    "ListArgument",
    "LoadedManifest",
    "Manifest",
    "Tensor",
    "TupleArgument",
    "examine",
    "load_manifest",
]
