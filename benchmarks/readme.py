# ruff: noqa: E501, RUF001 - the text of a table
"""Put the measured figures into the README, between its markers; ``--check`` only compares."""

from __future__ import annotations

import json
import sys

from _machine import RESULTS, ROOT

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def figures() -> str:
    cpu = json.loads((RESULTS / "cpu.json").read_text())
    launch = json.loads((RESULTS / "first_launch.json").read_text())
    gpu = json.loads((RESULTS / "bundle_on_gpu.json").read_text())
    first = launch["first_launch"]
    faster = launch["times_faster_than"]
    preload = json.loads((RESULTS / "preload.json").read_text())
    wide = json.loads((RESULTS / "warmup_16_cores.json").read_text())["scaling"]["rows"][-1]
    starts = "\n".join(
        f"| {label} | {first[name]['median_ms']:,.{0 if first[name]['median_ms'] >= 100 else 1}f} ms | "
        f"{first[name]['compiled']} | {f'{faster[name]:,.0f}×' if name in faster else ''} |"
        for name, label in (
            ("stock, no cache", "`triton.autotune`, no cache"),
            ("stock, warm compile cache", "`triton.autotune`, warm compile cache"),
            ("stock, warm, stored tuning", "`triton.autotune`, warm compile cache, `TRITON_CACHE_AUTOTUNING=1`"),
            ("persistent autotuner", "persistent autotuner, warm compile cache"),
            ("jit, config by hand", "`triton.jit` with the config by hand, warm compile cache"),
            ("stock jit, bundle", "`triton.jit` with the config by hand, the kernel from a tcache bundle"),
            ("bundle, frozen", "`tcache.autotune`, bundle, frozen"),
            ("bundle, preloaded", "the same after `tcache.preload()`"),
        )
    )
    chain, warmup, start = cpu["chain"], cpu["warmup"], cpu["start_up"]
    tuning, races, spread = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("tuning", "races", "two_gpus")
    )
    store = json.loads((RESULTS / "store.json").read_text())
    race, kill, seconds = races["race"], races["kill"], tuning["median_seconds"]
    machine, small = launch["machine"], cpu["machine"]
    host, adopted, model, warm_up = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("launch", "adopted", "record_model", "warmup")
    )
    rows = "\n".join(
        f"| {count} arguments | {row['us']['jit']:.1f} µs | {row['us']['stock']:.1f} µs | {row['us']['persistent']:.1f} µs "
        f"| {row['us']['tcache']:.1f} µs | {row['of_jit']:.2f} | {row['of_stock']:.2f} |"
        for count, row in host["arguments"].items()
    )
    same = model["frozen"]["same"]
    resolve, memory = warm_up["resolve"], max(row["peak_mb"]["parent"] for row in warm_up["memory"]["rows"])
    library = json.loads((RESULTS / "library.json").read_text())
    held = "\n".join(
        f"| {row['target']} | {row['least']:.2f} | {row['shapes'][0]['figure']:.2f} | "
        f"{row['shapes'][len(row['shapes']) // 2]['figure']:.2f} | {row['shapes'][-1]['figure']:.2f} |"
        for row in library["targets"]
        if row["shapes"]
    )
    peak = library["peaks"]["used"]
    opened, packing = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("bundle", "pack"))
    return f"""\
| first matmul launch of a fresh process, {machine["gpu"]} | median | compiled | tcache's bundle is faster |
|---|---:|---:|---:|
{starts}

![first launch](docs/figures/first_launch.svg)

Counted from when torch, Triton, the CUDA context and the kernel's module are there; {first["bundle, frozen"]["processes"]} \
processes each of stored tuning and of the bundle. A service of {preload["kernels"]} kernels preloads in \
{preload["preload_ms"]:.0f} ms; loading them at their first launches with stock Triton and a warm cache takes \
{preload["first_launches_stock_warm_cache_ms"]:.0f} ms; [preload.json](benchmarks/results/preload.json).
{machine["gpu"]}, {machine["cores"]} cores, Python {machine["python"]}, torch {machine["torch"]}, Triton {machine["triton"]}; \
[first_launch.json](benchmarks/results/first_launch.json).

On that GPU {gpu["checked"]} of {gpu["launches"]} launches ran from wheels that a machine without a GPU built and pip \
installed into a clean environment, checked against torch, as a user without a writable home and with no compiler on the path: \
{len(gpu["compiled"])} compiles by Triton's own listener, and each of {sum(bool(row["reasons"]) for row in gpu["outcomes"].values())} \
launches that were not packed (an unaligned pointer, another shape, an edited kernel or helper, another variable, a stock \
kernel moved some lines down) missed for its own reason; [bundle_on_gpu.json](benchmarks/results/bundle_on_gpu.json).

| host time of a launch seen before | `jit[grid]` | `triton.autotune` | persistent autotuner | tcache | of jit | of stock |
|---|---:|---:|---:|---:|---:|---:|
{rows}

![host time of a launch](docs/figures/launch.svg)

[launch.json](benchmarks/results/launch.json), without a GPU [launch_null.json](benchmarks/results/launch_null.json); the C launcher alone takes \
{", ".join(f"{row['us']['launcher']:.1f}" for row in host["arguments"].values())} µs of it.

A model of fla-core and liger-kernel, recorded forward and backward on that GPU, warmed up without one, and run again frozen: \
{model["frozen"]["compiled"]} compiles, {model["frozen"]["stats"]["tuned"]} tuned, {same["bitwise_equal"]} of {same["tensors"]} losses \
and gradients bitwise equal; [record_model.json](benchmarks/results/record_model.json). {adopted["kernels_adopted"]} kernels of the \
two libraries adopted: a restarted process runs their operators in {adopted["median_seconds"]["restart"]:.1f} s, \
`triton.autotune` with a warm compile cache in {adopted["median_seconds"]["stock"]:.0f} s, and with the tuning records that \
fla-core asks Triton to keep in {adopted["median_seconds"]["recorded"]:.0f} s; [adopted.json](benchmarks/results/adopted.json).

| tuning on {tuning["machine"]["gpu"]}, {tuning["machine"]["cores"]} cores | |
|---|---:|
| 24-config bf16 matmul at 4096³ from nothing, `triton.autotune` | {seconds["stock"]:.1f} s |
| the same, `tcache.autotune` | {seconds["tcache"]:.1f} s, {tuning["times_faster"]:.1f}× faster |
| its winner against an exhaustive benchmark, worst of {tuning["rounds"]} | {max(tuning["winner_of_best"]["tcache"]):.3f} of the best |
| {race["processes"]} processes that miss one shape at once, {race["repetitions"]} times: exactly one tuned, all right | {race["tuned_exactly_once"]} of {race["repetitions"]} |
| tuning processes killed at random: finished timings lost | {kill["timings_lost"]} of {kill["timings_finished"]} in {kill["kills"]} kills |
| `tcache tune --all-gpus` on {spread["gpus"]} GPUs, {spread["shapes"]} shapes, start-up included | {spread["times_faster"]:.2f}× one GPU |

[tuning.json](benchmarks/results/tuning.json), [races.json](benchmarks/results/races.json), \
[two_gpus.json](benchmarks/results/two_gpus.json).

| kernel library on {library["machine"]["gpu"]}, share or ratio in the same run | asked for | worst shape | median | best |
|---|---:|---:|---:|---:|
{held}

![roofline](docs/figures/roofline.svg)

{len(library["rows"])} cases; a copy reaches {peak["gbps"]:,.0f} GB/s and a bf16 matmul {peak["tflops"]["bfloat16"]:,.0f} TFLOP/s there; \
[library.json](benchmarks/results/library.json).

| without a GPU, {small["cores"]} cores | |
|---|---:|
| launches of the quickstart manifest that hit in `tcache verify` | {chain["hits"]} of {chain["launches"]} |
| bundle, of the cache that tuning the same manifest leaves | {cpu["packed_of_tuning_cache"]:.2%} ({chain["packed_bytes"] / 1e3:.0f} kB of {warmup["tuning_cache_bytes"] / 1e6:.1f} MB) |
| compiling {warmup["entries"]} entries two at a time against one at a time | {warmup["speedup"]:.2f}× ({warmup["speedup_of_the_whole_command"]:.2f}× with imports and replay) |
| compiling {wide["entries"]} entries {wide["jobs"]} at a time against one at a time, {wide["jobs"]} cores | efficiency \
{wide["compile_efficiency"]:.2f} ({wide["efficiency"]:.2f} for the whole command: {wide["before_compiling"]:.1f} s of imports come first) |
| `tcache resolve` of {resolve["launches"]} launches of {resolve["kernels"]} kernels of three libraries, imports included | {resolve["seconds"]:.1f} s |
| memory of `tcache warmup`'s parent, up to 15,000 launches of 70B-parameter shapes | {memory} MB |
| packing {packing["entries"]:,} entries as a directory, a wheel, an image, a native cache | {", ".join(f"{packing[kind]['seconds']:.1f}" for kind in ("dir", "wheel", "oci", "native"))} s |
| opening a bundle of {opened["entries"]:,} entries | {opened["milliseconds"]["open"]["median"]:.1f} ms |
| comparing the digests of a thousand small entries, of a few large ones | \
{opened["thousand_small_entries"]["verify_mb_per_s"]:,}, {opened["few_large_files"]["verify_mb_per_s"]:,} MB/s |
| store of {store["entries"]:,} entries over {store["kernels"]} kernels: a kernel's first lookup in a process | {store["first_lookup_ms"]:.1f} ms |
| each further shape of the kernel, once | {store["first_lookup_of_a_further_shape_us"]:.0f} µs |
| a shape looked up before | {store["later_lookup_us"]:.2f} µs |
| `tcache --help`, whole process | {start["help_ms"]:.0f} ms |
| `import tcache` | {start["import_adds_ms"]:.1f} ms |

Python {small["python"]}, torch {small["torch"]}, Triton {small["triton"]}; [cpu.json](benchmarks/results/cpu.json), \
[store.json](benchmarks/results/store.json), [warmup.json](benchmarks/results/warmup.json), \
[pack.json](benchmarks/results/pack.json), [bundle.json](benchmarks/results/bundle.json)."""


def rendered(text: str) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    if "--check" in sys.argv:
        raise SystemExit(0 if rendered(text) == text else "README's figures differ: run python benchmarks/readme.py")
    path.write_text(rendered(text))


if __name__ == "__main__":
    main()
