"""Which installed packages promise bundles: the quick search finds what importlib.metadata finds."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import zipfile

import pytest

from tcache import discover


def package(place, folder, text=None):
    info = place / folder
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.partition('-')[0]}\nVersion: 1.0\n")
    if text is not None:
        (info / "entry_points.txt").write_text(text)


@pytest.fixture
def sites(tmp_path, monkeypatch):
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(sys, "path", [*map(str, places), str(tmp_path / "absent"), *sys.path])
    importlib.invalidate_caches()
    return places


def both():
    quick = [(point.name, point.value) for point in discover._points()[0]]
    slow = [(point.name, point.value) for point in importlib.metadata.entry_points(group=discover.GROUP)]
    return sorted(quick), sorted(slow)


def test_the_quick_search_finds_what_importlib_finds(sites):
    first, second = sites
    package(first, "one-1.0.dist-info", "[tcache.bundles]\na = one.bundle\nb = one.other\n[console_scripts]\nx = y:z\n")
    package(first, "silent-1.0.dist-info")
    package(first, "mentions-1.0.dist-info", "[other]\nabout = tcache.bundles\n")
    package(first, "old.egg-info", "[tcache.bundles]\nold = old\n")
    package(second, "One-2.0.dist-info", "[tcache.bundles]\na = hidden_by_the_first\n")  # one package, found twice
    package(second, "two_b-1.0.dist-info", "[tcache.bundles]\ntwo = two_b\n")
    quick, slow = both()
    assert quick == slow
    assert {("a", "one.bundle"), ("b", "one.other"), ("old", "old"), ("two", "two_b")} <= set(quick)


def test_the_quick_search_looks_into_zip_files(sites, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as file:
        file.writestr("zipped-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped\nVersion: 1.0\n")
        file.writestr("zipped-1.0.dist-info/entry_points.txt", "[tcache.bundles]\nzipped = zipped\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packed.zip")])
    quick, slow = both()
    assert quick == slow
    assert ("zipped", "zipped") in quick


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("[tcache.bundles]\nno equals sign\n", None, "its entry points cannot be read: "),
        ("[tcache.bundles]\nbad = outer_of_bad.bundle\n", "raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("[tcache.bundles]\nbad = outer_of_bad.bundle\n", "def (", "SyntaxError: "),
        ("[tcache.bundles]\nbad = absent.bundle\n", None, "leads nowhere: ModuleNotFoundError"),
    ],
)
def test_a_broken_package_hides_no_other(sites, text, code, problem):
    """One package of somebody else's must not keep a service from starting."""
    first, second = sites
    package(first, "bad-1.0.dist-info", text)
    if code is not None:
        (first / "outer_of_bad").mkdir()
        (first / "outer_of_bad" / "__init__.py").write_text(code)
    package(second, "good-1.0.dist-info", "[tcache.bundles]\ngood = the_good_bundle\n")
    (second / "the_good_bundle").mkdir()
    (second / "the_good_bundle" / "bundle.json").write_text("{}")
    found = discover.installed()
    assert discover.Offer(str(second / "the_good_bundle")) in found
    assert [problem in offer.problem for offer in found if str(second) not in offer.path] == [True]
