"""Options that several commands share, and what they mean."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from tcache.errors import TcacheError
    from tcache.keys.gpu import GPU
    from tcache.manifest import Case, LoadedManifest
    from tcache.resolve import Resolved, Unresolved
    from tcache.store import Store

F = TypeVar("F", bound="Callable[..., Any]")

__all__ = ["Selection", "json_option", "manifests", "quiet_noise", "select", "selection_options", "untuned_option"]


def manifests(required: bool = True) -> Callable[[F], F]:
    """The MANIFEST… argument."""
    return click.argument(
        "manifests", nargs=-1, required=required, type=click.Path(path_type=Path), metavar="MANIFEST..."
    )


json_option = click.option(
    "--json", "as_json", is_flag=True, envvar="TCACHE_JSON", show_envvar=True, help="Print JSON with a version field."
)


_UNTUNED = (
    "Shapes without a best config: list them and exit 1, use the nearest tuned shape's, or the first config. "
    "all: every config of every shape, as tuning would."
)


def untuned_option(*more: str, more_help: str = "") -> Callable[[F], F]:
    """--untuned; a command may take choices of its own."""
    return click.option(
        "--untuned", type=click.Choice(["error", "nearest", "default", "all", *more]), default="error",
        show_default=True, show_envvar=True, help=_UNTUNED + more_help,
    )  # fmt: skip


def selection_options(function: F) -> F:
    """GPU, target, store and cache."""
    for option in (
        click.option(
            "--cache-dir", type=click.Path(path_type=Path, file_okay=False), envvar="TRITON_CACHE_DIR",
            show_envvar=True, help="Triton cache to use.  [default: Triton's own]",
        ),
        click.option(
            "--store", type=click.Path(path_type=Path), envvar="TCACHE_STORE", show_envvar=True,
            help="Directory of best configs.  [default: the project's, then ~/.tcache/store]",
        ),
        click.option(
            "--target", envvar="TCACHE_TARGET", show_envvar=True,
            help="Compile target of a GPU outside the catalogue, such as cuda:90:32.",
        ),
        click.option(
            "--gpu", "gpus", multiple=True, type=_GPUName(), envvar="TCACHE_GPU", show_envvar=True, metavar="NAME",
            help="GPU as its driver names it; may be repeated.  [default: the manifest's gpus]",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


class _GPUName(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A name with blanks in it: several in TCACHE_GPU are separated by commas."""

    name = "name"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        return str(value).strip()


class Selection:
    """What a command works on.

    Attributes:
        manifests: the manifests, checked.
        gpus: GPUs by manifest.
        stores: where best configs are looked up, in order.
        aliases: of GPU names, as the project states them.
    """

    def __init__(
        self, manifests: list[LoadedManifest], gpus: list[list[GPU]], stores: tuple[Store, ...], aliases: dict[str, str]
    ) -> None:
        self.manifests = manifests
        self.gpus = gpus
        self.stores = stores
        self.aliases = aliases

    def cases(self) -> list[Case]:
        return [case for manifest in self.manifests for case in manifest.cases()]

    def resolve(
        self,
        untuned: str,
        broken: list[TcacheError] | None = None,
        found: Callable[[Resolved], None] = lambda _: None,
    ) -> tuple[list[Resolved], list[Unresolved]]:
        """Resolve every launch for every GPU; cases that cannot be replayed are noted in ``broken`` if it is given, and
        ``found`` is called with each launch as it is resolved.
        """
        from tcache.resolve import resolve

        done: list[Resolved] = []
        missing: list[Unresolved] = []
        with contextlib.redirect_stdout(sys.stderr):  # what kernel files print is no answer of ours
            for manifest, gpus in zip(self.manifests, self.gpus, strict=True):
                for gpu in gpus:
                    rows, open_ = resolve(manifest.cases(), gpu, self.stores, untuned, broken, found)
                    done += rows
                    missing += open_
        return done, missing


def _need_directory(path: Path) -> None:
    """Refuse a Triton cache that could not be made, before anything is compiled for it."""
    from tcache.errors import OutputError

    place = path.absolute()
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir() or (place != path.absolute() and not os.access(place, os.W_OK)):
        reason = "not writable" if place.is_dir() else "no directory"
        raise OutputError(f"{path}: cannot be the Triton cache: {place} is {reason}", "choose another --cache-dir")


def quiet_noise() -> None:
    """Silence upstream warnings a reader of our output can do nothing about."""
    import warnings

    # torch says so while it is imported; nothing here needs numpy
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    # Triton 3.9 announces a change of 3.10's default each time a kernel is bound
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset", category=UserWarning)


def select(
    paths: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    *, new_store: bool = False,
) -> Selection:  # fmt: skip
    """Turn the shared options into a :class:`Selection`; checks everything before anything is done.

    Args:
        new_store: the store may be one that is yet to be made.

    Raises:
        TcacheError: a manifest, GPU, target, store or project file is not what it should be.
    """
    from tcache.errors import ManifestError, UnknownGPU, UsageError
    from tcache.keys.gpu import Target, find_gpu
    from tcache.manifest import load_manifest
    from tcache.project import find_project
    from tcache.store import Store, default_store

    quiet_noise()
    parsed = Target.parse(target) if target else None
    loaded = [load_manifest(path) for path in paths]
    for line in [line for manifest in loaded for line in manifest.unreplayable()]:
        click.echo(f"note: {line}", err=True)
    project = find_project(loaded[0].path.parent)
    named = store or project.store
    if named is not None and named.exists() and not named.is_dir():
        raise UsageError(f"{named}: the store is a file, expected a directory", "give a directory with --store")
    if store is not None and not store.is_dir() and not new_store:
        raise UsageError(f"{store}: no such store", "give a directory of best configs with --store")
    fallback = default_store()
    stores = (Store(named),) if named is not None else ((Store(fallback),) if fallback is not None else ())
    known = {name: gpu for one in stores for name, gpu in one.gpus().items()}
    chosen = []
    for manifest in loaded:
        names = list(gpus) or manifest.gpus
        if not names:
            raise UsageError(
                f"{manifest.path}: no GPU named, neither by --gpu nor by the manifest",
                'for example --gpu "NVIDIA H200"',
            )
        try:
            chosen.append([find_gpu(project.gpu_aliases.get(name, name), parsed, known) for name in names])
        except UnknownGPU as error:
            if gpus:
                raise
            raise ManifestError(manifest.gpus_where, error.message, error.hint) from error
    if cache_dir is not None:
        from tcache._triton.cache import set_cache_directory

        _need_directory(cache_dir)
        set_cache_directory(str(cache_dir.resolve()))
    return Selection(loaded, chosen, stores, project.gpu_aliases)
