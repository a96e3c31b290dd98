"""Thousands of damaged bundles: each is a hit on the bytes that were packed, or a miss with a reason."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

from tcache.active import _BundleStore, activate
from tcache.bundle import Bundle, Rejected
from tcache.diff import diff
from tcache.errors import BundleError, CacheMiss, TcacheError
from tcache.overlay import OverlayCacheManager
from tcache.preloading import preload

sys.path.insert(0, str(Path(__file__).parent))
import bundle_project

FILES, HEADS, SIGNED, LAUNCHES, DOCUMENTS = 2600, 1800, 800, 150, 120
JUNK = [
    None,
    -1,
    0,
    1.5,
    2**70,
    True,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "a\nb",
    [],
    {},
    [[]],
    {"a": 1},
    "é",
    float("nan"),
]


@pytest.fixture(scope="module")
def packed(packed_project):
    root = packed_project
    original = {
        path.relative_to(root / "bundle").as_posix(): path.read_bytes()
        for path in (root / "bundle").rglob("*")
        if path.is_file()
    }
    return root, original


class Damaged:
    """A copy of the bundle in which one file at a time is damaged and then put back."""

    def __init__(self, original, root, seed):
        self.original, self.root, self.random = original, root, random.Random(seed)
        self.names = sorted(original)
        for name in self.names:
            self.put(name, original[name])

    def put(self, name, data):
        path = self.root / name
        if path.is_symlink() or path.exists():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def file(self):
        """Damage any file in any way; return what was done."""
        name = self.random.choice(self.names)
        data = bytearray(self.original[name])
        kind = self.random.choice(
            ["flip", "flip", "flip", "cut", "extend", "empty", "noise", "swap", "gone", "folder", "link", "pipe"]
        )
        path = self.root / name
        if kind == "flip":
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        elif kind == "cut":
            del data[self.random.randrange(len(data)) :]
        elif kind == "extend":
            data += self.random.randbytes(self.random.choice([1, 16, 4096]))
        elif kind == "empty":
            data.clear()
        elif kind == "noise":
            data = bytearray(self.random.randbytes(len(data)))
        elif kind == "swap":
            data = bytearray(self.original[self.random.choice(self.names)])
        if kind in ("gone", "folder", "link", "pipe"):
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(self.random.choice([name, "/etc/passwd", "nowhere", "/dev/zero"]))
            elif kind == "pipe":
                os.mkfifo(path)
        else:
            path.write_bytes(data)
        return name, kind

    def head(self):
        """Change one value anywhere in bundle.json, or its text."""
        text = self.original["bundle.json"].decode()
        if self.random.random() < 0.2:
            text = self.random.choice([
                "[" * 200_000, "{}", "null", "\ufeff" + text, text + text, text.replace(":", "", 1), "NaN",
                text.replace("{", '{"schema": 99,', 1), text.replace('"schema": 1', '"schema": 2'),
                text.replace('"schema": 1', '"schema": "1"'), text[: self.random.randrange(len(text))],
            ])  # fmt: skip
        else:
            data = json.loads(text)
            parent, key = self.random.choice(list(places(data)))
            action = self.random.choice(["junk", "junk", "delete", "rename", "copy"])
            if action == "junk":
                parent[key] = self.random.choice(JUNK)
            elif action == "delete":
                del parent[key]
            elif action == "rename" and isinstance(parent, dict):
                parent[self.random.choice(["x", "../../etc/passwd", "/x", "a//b", "entries/x/y", ""])] = parent.pop(key)
            else:
                other, other_key = self.random.choice(list(places(data)))
                parent[key] = json.loads(json.dumps(other[other_key]))
            text = json.dumps(data)
        (self.root / "bundle.json").write_text(text, "utf-8")
        return "bundle.json", "head"

    def signed(self):
        """Damage what an entry or the index says, and sign it as if it had been packed so."""
        name = self.random.choice([name for name in self.names if name.startswith(("entries/", "index.json"))])
        data = bytearray(self.original[name])
        if name.endswith(".json"):
            value = json.loads(bytes(data))
            parent, key = self.random.choice(list(places(value)))
            if self.random.random() < 0.3:
                del parent[key]
            else:
                parent[key] = self.random.choice(JUNK)
            data = bytearray(json.dumps(value).encode())
        elif self.random.random() < 0.5:
            struct.pack_into("<I", data, 48, self.random.getrandbits(32))  # the flags: which architecture
        else:
            del data[self.random.randrange(len(data)) :]
        (self.root / name).write_bytes(data)
        bundle_project.sign(self.root)
        return name, "signed"

    def restore(self, name):
        self.put(name, self.original[name])
        self.put("bundle.json", self.original["bundle.json"])


def places(value):
    """Yield every (container, key) in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(pairs):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places(item)


def reason(found):
    assert isinstance(found, Rejected), found
    assert found.reason
    assert found.kind
    return "refused"


def outcomes(damaged, sources):
    """Ask a damaged bundle for everything; every answer is what was packed, or a reason."""
    try:
        bundle = Bundle(damaged.root)
    except BundleError as error:
        yield "no bundle" if error.message else "silent"
        return
    for key in sorted({name.split("/")[1] for name in damaged.original if name.startswith("entries/")}):
        files = bundle.entry_files(key)
        if files is None:
            yield "absent"
        elif isinstance(files, dict):
            for file, path in files.items():
                assert path.read_bytes() == damaged.original[f"entries/{key}/{file}"], (key, file)
            yield "hit"
        else:
            yield reason(files)
    for source in sources:
        helper = bundle.helper(source=source)
        if isinstance(helper, Path):
            assert helper.read_bytes() == damaged.original[helper.relative_to(bundle.place).as_posix()]
            yield "hit"
        else:
            yield "absent" if helper is None else reason(helper)
    with contextlib.suppress(BundleError):
        bundle.index()
    store = _BundleStore(bundle)
    for name in damaged.original:
        if name.startswith("store/") and store.read(bundle.place / name) is not None:
            assert (bundle.place / name).read_bytes() == damaged.original[name]


@pytest.fixture
def damaged(packed, tmp_path):
    return Damaged(packed[1], tmp_path / "bundle", seed=20)


def sources_of(original):
    return {row["source"]: row["path"] for row in json.loads(original["bundle.json"])["helpers"]}


def test_any_file_damaged_in_any_way(packed, damaged):
    seen = collections.Counter()
    for _ in range(FILES):
        name, kind = damaged.file()
        found = list(outcomes(damaged, sources_of(packed[1])))
        seen.update(found)
        if name.startswith("entries/") and kind in (
            "flip",
            "cut",
            "extend",
            "empty",
            "noise",
            "gone",
            "folder",
            "pipe",
            "link",
        ):
            assert "refused" in found, (name, kind)
        damaged.restore(name)
    assert min(seen[kind] for kind in ("hit", "refused", "no bundle")) > 50, seen
    assert set(outcomes(damaged, sources_of(packed[1]))) == {"hit"}


def test_anything_in_bundle_json(packed, damaged):
    seen = collections.Counter()
    for _ in range(HEADS):
        damaged.head()
        seen.update(outcomes(damaged, sources_of(packed[1])))
    assert min(seen[kind] for kind in ("hit", "refused", "no bundle")) > 20, seen
    assert seen["absent"], seen
    assert not seen["silent"]


def test_a_damaged_entry_that_was_signed(packed, damaged):
    """Digests cannot help here; metadata, binary and name must agree with each other all the same."""
    seen = collections.Counter()
    for _ in range(SIGNED):
        name, _ = damaged.signed()
        bundle = Bundle(damaged.root)
        try:
            index = bundle.index()
            for entry in bundle.entries:
                if entry in index:
                    index.fact(entry)
        except (BundleError, KeyError, TypeError, ValueError, AttributeError):
            seen["index"] += 1
        for key in bundle.entries:
            files = bundle.entry_files(key)
            if isinstance(files, Rejected):
                seen[reason(files)] += 1
                continue
            seen["hit"] += 1
            for file, path in files.items():
                data = path.read_bytes()
                if file.endswith(".json"):
                    before, now = json.loads(damaged.original[f"entries/{key}/{file}"]), json.loads(data)
                else:
                    assert len(data) == len(damaged.original[f"entries/{key}/{file}"])
            assert (before["target"]["arch"], before["hash"]) == (now["target"]["arch"], now["hash"])
        damaged.restore(name)
    assert seen["refused"] > 50, seen
    assert seen["hit"] > 50, seen


def test_what_reaches_the_driver_is_what_was_packed(packed, damaged, null_gpu, monkeypatch):
    """Through Triton itself: a launch loads the packed binary, or is a CacheMiss, or never got a bundle."""
    root, original = packed
    module = bundle_project.load(root)
    [binary] = [data for name, data in original.items() if name.endswith("/scale.cubin")]
    loaded = []
    monkeypatch.setattr(
        null_gpu.utils, "load_binary", lambda name, data, *_: (loaded.append(data), name, 32, 0, 1024), raising=False
    )
    x, seen = torch.zeros(4096), collections.Counter()
    for number in range(LAUNCHES):
        name, _ = (damaged.file, damaged.head, damaged.signed)[number % 3]()
        activate(bundles=[damaged.root], mode="frozen")
        module.scale.device_caches.clear()
        try:
            module.scale[(1,)](x, x, 4096, BLOCK=64)
        except CacheMiss as miss:
            seen["miss" if miss.reasons else "silent"] += 1
        else:
            seen["hit"] += 1
            assert loaded[-1] == binary or (name.endswith("/scale.cubin") and number % 3 == 2)
        damaged.restore(name)
    module.scale.device_caches.clear()
    assert min(seen["miss"], seen["hit"]) > 10, seen
    assert not seen["silent"]


def outcome(call):
    try:
        call()
    except CacheMiss as miss:
        return "miss" if miss.reasons else "silent"
    except TcacheError as error:
        return "refused" if error.message else "silent"
    return "fine"


@pytest.mark.parametrize("kind", ["index.json", "store", "bundle.json"])
def test_documents_that_were_signed_lead_to_a_hit_or_a_reason(packed, damaged, null_gpu, kind):
    """On every way that reads them: launches of tuned and of stock kernels, preloading, comparing, helpers."""
    root, original = packed
    [name] = [name for name in original if name.endswith(".json") and name.startswith(kind)]
    helper = next(name for name in original if name.endswith(".so"))
    module, seen = bundle_project.load(root), collections.Counter()
    x = torch.zeros(4096)
    calls = {
        "tuned": lambda: module.tuned[(1,)](x, 16),
        "untuned": lambda: module.tuned[(1,)](x, 17),
        "stock": lambda: module.scale[(1,)](x, x, 4096, BLOCK=64),
        "other": lambda: module.scale[(1,)](x, x, 4097, BLOCK=64),
        "preload": preload,
        "put": lambda: OverlayCacheManager("A" * 52).put(original[helper], Path(helper).name),
        "diff": lambda: diff(damaged.root, root / "bundle"),
    }
    for _ in range(DOCUMENTS):
        value = json.loads(original[name])
        parent, key = damaged.random.choice(list(places(value)))
        if damaged.random.random() < 0.3:
            del parent[key]
        else:
            parent[key] = damaged.random.choice(JUNK)
        damaged.put(name, json.dumps(value).encode())
        if kind != "bundle.json":
            bundle_project.sign(damaged.root)
        activate(bundles=[damaged.root], mode="frozen")
        for what, call in calls.items():
            module.scale.device_caches.clear()
            module.tuned.fn.device_caches.clear()
            module.tuned.cache.clear()
            seen[what, outcome(call)] += 1
        damaged.restore(name)
    assert seen["untuned", "miss"] == seen["other", "miss"] == DOCUMENTS, seen
    assert min(seen["stock", "fine"], seen["tuned", "fine"], seen["preload", "fine"]) > 10, seen
    assert not [row for row in seen if row[1] == "silent" or (row[1] == "refused" and row[0] != "diff")], seen
