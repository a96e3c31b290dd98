"""Shape manifests: which launches to replay."""

from tcache.manifest.load import Case, LoadedManifest, load_manifest
from tcache.manifest.model import CallItem, Constant, KernelItem, Manifest, Tensor

__all__ = ["CallItem", "Case", "Constant", "KernelItem", "LoadedManifest", "Manifest", "Tensor", "load_manifest"]
