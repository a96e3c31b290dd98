"""Store files read entry by entry: never other than what reading them as a whole gives."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcache.errors import StoreError
from tcache.keys import ShapeKey, find_gpu, space_identity
from tcache.scan import Scan
from tcache.store import Entry, Kernel, Record, Timing

PATH = Path("store.json")
A, B = "BLOCK=16 | num_warps=4", 'BLOCK="}, {" | num_warps=4'


def entry(name, n):
    shape = ShapeKey((("name", name), ("n", n)), (("x", "float32"),))
    timings = {A: Timing(2.0, 1.9, 2.1), B: Timing(failed='said "no"\n    },\n')}
    return Entry(shape, A, timings, "sha256:s", space_identity([A, B]), "3.6.0", "2026-01-01T00:00:00Z")


def record(names):
    entries = [entry(name, n) for n, name in enumerate(names)]
    return Record(find_gpu("NVIDIA H200"), Kernel("m", "k", ("name", "n")), {made.shape: made for made in entries})


@given(st.lists(st.text(max_size=12), max_size=6))
def test_equals_the_whole(names):
    made = record(names)
    text = made.text()
    for layout in (text, json.dumps(json.loads(text)), json.dumps(json.loads(text), indent=2)):
        scan = Scan(layout, PATH)
        assert scan.gpu.name == made.gpu.name
        assert scan.qualname == "k"
        for shape, expected in made.entries.items():
            assert scan.get(shape) == expected
        assert scan.get(ShapeKey((("name", "absent"), ("n", -1)), ())) is None
        assert scan.record().entries == made.entries


def test_only_what_is_asked_for_is_parsed(monkeypatch):
    made = record("abcdef")
    scan = Scan(made.text(), PATH)
    parsed = []
    parse = Entry.parse.__func__
    monkeypatch.setattr(Entry, "parse", classmethod(lambda cls, *a: parsed.append(a[0]) or parse(cls, *a)))
    scan.get(entry("c", 2).shape)
    assert parsed == [str(entry("c", 2).shape)]


def test_a_name_written_in_another_order_is_found():
    text = record("a").text()
    assert '    "name=\\"a\\" n=0' in text
    text = text.replace('name=\\"a\\" n=0', 'n=0 name=\\"a\\"')
    assert Scan(text, PATH).get(entry("a", 0).shape).timings == entry("a", 0).timings


def test_damage_is_an_error_or_in_another_entry():
    made = record("abc")
    text = made.text()
    wrong = []
    for place in range(len(text)):
        for damaged in (text[:place], text[:place] + text[place + 1 :], text[:place] + "<" + text[place + 1 :]):
            for shape, expected in made.entries.items():
                with contextlib.suppress(StoreError):
                    found = Scan(damaged, PATH).get(shape)
                    whole = None
                    with contextlib.suppress(StoreError):
                        whole = Record.parse(damaged, PATH).entries.get(shape)
                    if found not in (None, expected, whole):
                        wrong.append((place, found))
    assert not wrong


@pytest.mark.parametrize("marker", ["<<<<<<< ours", "=======", ">>>>>>> theirs"])
def test_a_merge_conflict_is_an_error(marker):
    made = record("abc")
    lines = made.text().splitlines(keepends=True)
    for place in range(1, len(lines)):
        text = "".join([*lines[:place], "<<<<<<< ours\n", lines[place], marker + "\n", *lines[place + 1 :]])
        with pytest.raises(StoreError, match="corrupt"):
            Scan(text, PATH).get(entry("a", 0).shape)


@given(st.lists(st.text(max_size=12), max_size=6), st.text(max_size=12), st.integers(0, 6))
def test_rewriting_one_entry_gives_what_rewriting_all_does(names, name, n):
    made = record(names)
    new = entry(name, n)
    extra = {"note": 1, "kernel": {"owner": "x"}}
    whole = Record(made.gpu, made.kernel, {**made.entries, new.shape: new}, extra).text()
    for layout in (made.text(), json.dumps(json.loads(made.text()))):
        assert Scan(layout, PATH).replacing(new, extra) == whole
    assert Scan(whole, PATH).extra == extra


def test_rewriting_replaces_an_entry_written_in_another_order():
    text = record("ab").text().replace('name=\\"a\\" n=0', 'n=0 name=\\"a\\"')
    assert Scan(text, PATH).replacing(entry("a", 0), {"kernel": {}}) == record("ab").text()


def test_damaged_entries_are_neither_used_nor_lost():
    text = record("ab").text().replace('"median_ms": 2.0', '"median_ms": two', 1)
    scan = Scan(text, PATH)
    with pytest.raises(StoreError, match=r"store.json:\d+:\d+: corrupt"):
        scan.get(entry("a", 0).shape)
    assert scan.get(entry("b", 1).shape) == entry("b", 1)
    assert scan.replacing(entry("b", 1), {"kernel": {}}) == text
