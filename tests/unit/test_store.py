from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcache.decide import Best, Missing, decide
from tcache.errors import StoreError
from tcache.keys import ShapeKey, find_gpu, space_identity
from tcache.store import Entry, Kernel, Record, Store, Timing

GPU = find_gpu("NVIDIA H200")
KERNEL = Kernel("pkg.module", "kernel", ("n",))
A, B, C = (f"BLOCK={n} | num_warps=4" for n in (16, 32, 64))


def shape(n):
    return ShapeKey((("n", n),), (("x", "float32"),))


def entry(n=1, timings=None, **changes):
    timings = timings if timings is not None else {A: Timing(2.0, 1.9, 2.1), B: Timing(1.0, 0.9, 1.1, reps=20)}
    made = Entry(shape(n), B, timings, "sha256:s", space_identity([A, B]), "3.6.0", "2026-01-01T00:00:00Z")
    return replace(made, **changes)


def put(store, made):
    store.update(GPU, KERNEL, made.shape, lambda _: made)


def test_written_and_read_again(tmp_path):
    put(Store(tmp_path), entry())
    assert Store(tmp_path).get(GPU, KERNEL, shape(1), "sha256:s") == entry()
    assert Store(tmp_path).get(GPU, KERNEL, shape(2), "sha256:s") is None
    assert Store(tmp_path / "absent").get(GPU, KERNEL, shape(1), "sha256:s") is None


milliseconds = st.floats(min_value=1e-6, max_value=1e4).map(lambda value: float(f"{value:.5g}"))


@given(st.lists(milliseconds, min_size=3, max_size=3), st.text(max_size=30))
def test_timings_round_trip(times, reason):
    for timing in (Timing(*times, reps=3), Timing(failed=reason)):
        assert Timing.parse(json.loads(json.dumps(timing.plain()))) == timing


def test_files_are_sorted_stable_and_one_line_per_timing(tmp_path):
    store = Store(tmp_path)
    for n in (4096, 16, 2, 1):
        put(store, entry(n))
    text = store.path(GPU, KERNEL).read_text()
    found = [line.split('"')[1] for line in text.splitlines() if line.startswith('    "n=')]
    assert [key.split(" ")[0] for key in found] == ["n=1", "n=2", "n=16", "n=4096"]
    assert sum('"median_ms": 2.0' in line and "BLOCK=16" in line for line in text.splitlines()) == 4
    assert Record.parse(text, store.path(GPU, KERNEL)).text() == text
    assert json.loads(text)["gpu"]["name"] == "NVIDIA H200"


def test_unknown_fields_are_kept_on_rewrite(tmp_path):
    store = Store(tmp_path)
    put(store, entry())
    path = store.path(GPU, KERNEL)
    data = json.loads(path.read_text())
    data["future"] = {"a": 1}
    data["kernel"]["owner"] = "team"
    data["entries"][str(shape(1))]["note"] = "reviewed"
    data["entries"][str(shape(1))]["timings"][A]["registers"] = 32
    path.write_text(json.dumps(data))
    put(Store(tmp_path), entry(2))
    data = json.loads(path.read_text())
    assert data["future"] == {"a": 1}
    assert data["kernel"]["owner"] == "team"
    assert data["entries"][str(shape(1))]["note"] == "reviewed"
    assert data["entries"][str(shape(1))]["timings"][A]["registers"] == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "corrupt store file"),
        ("{", r":1:2: corrupt store file"),
        ("[]", "no 'schema' field"),
        ('{"schema": 99}', "store schema 99, expected 1"),
        ('{"schema": 1}', "no field 'kernel'"),
        ('{"schema": 1, "kernel": {"ref": "x", "key": []}, "gpu": {}, "entries": {}}', "corrupt store file"),
    ],
)
def test_damaged_files_are_one_clear_error(tmp_path, text, message):
    store = Store(tmp_path)
    path = store.path(GPU, KERNEL)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StoreError, match=message) as error:
        store.get(GPU, KERNEL, shape(1), "sha256:s")
    assert str(path) in error.value.message
    assert error.value.hint
    with pytest.raises(StoreError):  # a damaged record is not overwritten
        put(store, entry())
    assert path.read_text() == text


def test_a_truncated_file_is_corrupt_wherever_it_ends(tmp_path):
    store = Store(tmp_path)
    put(store, entry())
    path = store.path(GPU, KERNEL)
    text = path.read_text()
    for end in range(0, len(text) - 3, 7):
        path.write_text(text[:end])
        with pytest.raises(StoreError):
            Store(tmp_path).get(GPU, KERNEL, shape(1), "sha256:s")


def test_another_gpu_of_the_same_slug_is_refused(tmp_path):
    store = Store(tmp_path)
    put(store, entry())
    twin = replace(GPU, name="NVIDIA-H200")
    with pytest.raises(StoreError, match="belongs to 'NVIDIA H200'"):
        store.get(twin, KERNEL, shape(1), "sha256:s")


def test_a_moved_kernel_is_found_by_its_source(tmp_path):
    store = Store(tmp_path)
    put(store, entry())
    moved = Kernel("other.place", "kernel", ("n",))
    assert store.get(GPU, moved, shape(1), "sha256:s") == entry()
    assert store.get(GPU, moved, shape(1), "sha256:edited") is None


def test_an_unwritable_store_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot write the store") as error:
        put(Store(blocked), entry())
    assert "TCACHE_STORE" in error.value.hint


def _add(root, n):
    store = Store(root)
    for index in range(10):
        put(store, entry(n * 100 + index))


def test_many_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add, args=(tmp_path, n)) for n in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    record = Store(tmp_path).read(Store(tmp_path).path(GPU, KERNEL))
    assert len(record.record().entries) == 40


def test_a_change_on_disk_is_seen_where_it_matters(tmp_path):
    store, other = Store(tmp_path), Store(tmp_path)
    put(other, entry())
    assert store.get(GPU, KERNEL, shape(1), "sha256:s").config == B
    put(other, entry(config=A))
    put(other, entry(2))
    assert store.get(GPU, KERNEL, shape(2), "sha256:s") == entry(2)  # what it did not have
    assert store.get(GPU, KERNEL, shape(1), "sha256:s", fresh=True).config == A
    assert store.get(GPU, KERNEL, shape(1), "sha256:s").config == A
    put(store, entry())  # its own writes
    assert store.get(GPU, KERNEL, shape(1), "sha256:s").config == B
    assert store.get(GPU, KERNEL, shape(1), "sha256:edited").source == "sha256:s"


def test_nothing_temporary_is_left(tmp_path):
    put(Store(tmp_path), entry())
    assert sorted(os.listdir(tmp_path / "nvidia-h200")) == [".tuning", "pkg.module.kernel.json"]
    assert sorted(os.listdir(tmp_path / "nvidia-h200" / ".tuning")) == [".gitignore", "pkg.module.kernel.lock"]


def test_decide():
    def verdict(e, configs, pruned=None, source="sha256:s", triton="3.6.0"):
        return decide(e, configs, pruned, source, triton)

    assert verdict(None, [A, B]) == Missing("never tuned", (A, B))
    assert verdict(entry(), [A, B]) == Best(B)
    assert verdict(entry(), [A, B], triton="3.7.1") == Best(B, aged="3.6.0")
    assert verdict(entry(), [A, B], source="sha256:x").reason.startswith("stale")
    # the winner was removed from the space: the next best, without benchmarking
    assert verdict(entry(), [A]) == Best(A)
    # a config was added: only that one is untried
    assert verdict(entry(), [A, B, C]) == Missing("some configs were never tried", (C,), B)
    # … unless pruning removes it for this launch
    assert verdict(entry(), [A, B, C], [A, B]) == Best(B)
    # pruning was complete for this space before: nothing to ask again
    assert verdict(entry(space=space_identity([A, B, C])), [A, B, C]) == Best(B)
    failed = entry(timings={A: Timing(failed="x"), B: Timing(failed="y")}, config=None)
    assert verdict(failed, [A, B]) == Missing("every config failed when it was tuned", ())
    assert verdict(entry(timings={A: Timing(failed="x"), B: Timing(1.0)}), [A, B]) == Best(B)


def test_equal_timings_go_to_the_recorded_winner_and_else_to_the_first_listed():
    same = {key: Timing(1.0, 0.9, 1.1) for key in (A, B, C)}

    def best(configs, **fields):
        return decide(entry(timings=same, **fields), configs, None, "sha256:s", "3.6.0").config

    assert best([C, B, A], config=B) == B
    assert best([C, A], config=B) == C
    assert best([A, C], config=B) == A
    faster = {**same, C: Timing(1.0, 0.8, 1.1)}  # equal medians: the 20th percentile, as upstream compares
    assert decide(entry(timings=faster, config=None), [A, B, C], None, "sha256:s", "3.6.0") == Best(C)
