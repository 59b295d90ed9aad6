"""Plant a named fault in a copy of the tree and see the tests turn red.

    python tools/gate.py --list
    python tools/gate.py --break NAME [NAME …]
    python tools/gate.py --all

Each fault replaces a text that must occur exactly once, so a fault that no longer applies is an
error, not a pass. The tests that guard against it must pass before and fail after; anything else
(no such test, an error at import) is a failure of the gate. The tree itself is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = [
    "memra_lowlevel", "cuda_src", "tests", "tools", "examples", "docs", "benchmarks",
    "pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", ".gitignore", "run.py",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One mutation: what it breaks, how, and which tests must see it."""

    name: str
    about: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    cheap: bool = False


FAULTS = (
    # -- speculation ------------------------------------------------------------------------------
    Fault(
        "rewind-skipped", "rejected drafts stay in the target's planes",
        "memra_lowlevel/speculative/round.py",
        "            if amounts.target:\n                planes.set_len(",
        "            if False:\n                planes.set_len(",
        ("tests/speculative/test_round.py::test_equals_plain_greedy",),
    ),
    Fault(
        "rewind-mirror-only", "a rewind moves the host mirror and not the device counter",
        "memra_lowlevel/graph/counters.py",
        "        stream.context.driver.cuMemsetD32Async(\n            self.buffer.ptr, value,",
        "        stream.context.driver.cuMemsetD32Async(\n            self.buffer.ptr, self.value,",
        ("tests/graph/test_graph_counters.py::test_eager_writes_move_both",), True,
    ),
    Fault(
        "bonus-off-by-one", "the token behind the accepted drafts is that of the row before",
        "memra_lowlevel/speculative/accept.py",
        "return accepted, [*drafts[:accepted], argmax[accepted]]",
        "return accepted, [*drafts[:accepted], argmax[max(0, accepted - 1)]]",
        ("tests/speculative/test_round.py::test_equals_plain_greedy",),
    ),
    Fault(
        "everything-accepted", "every draft counts as right",
        "memra_lowlevel/speculative/accept.py",
        "while accepted < len(drafts) and drafts[accepted] == argmax[accepted]:",
        "while accepted < len(drafts):",
        ("tests/speculative/test_round.py::test_equals_plain_greedy",),
    ),
    Fault(
        "rewind-amount", "one row too few is dropped after a rejection",
        "memra_lowlevel/speculative/accept.py",
        "Rewind(target=k - accepted,", "Rewind(target=max(0, k - accepted - 1),",
        ("tests/speculative/test_accept.py",), True,
    ),
    # -- planes -----------------------------------------------------------------------------------
    Fault(
        "base-not-mirrored", "a rebase does not write the ring's base on the device",
        "memra_lowlevel/cache/kv_layer.py",
        "        self.lengths.set_base(stream, self.index, new_base)",
        "        pass",
        ("tests/cache/test_kv_ring.py::test_ring_equals_flat_bit_for_bit",),
    ),
    Fault(
        "window-edge", "a window shows one key too many",
        "cuda_src/common/counters.cuh",
        "bound > window ? bound - window : 0;", "bound > window ? bound - window - 1 : 0;",
        ("tests/kernels/test_kv_attend.py::test_windows",),
    ),
    Fault(
        "q5-1-ties", "q5_1 rounds ties downwards",
        "cuda_src/common/block32.cuh",
        "__fadd_rn(__fmul_rn(__fsub_rn(x, m), id), 0.5f)",
        "__fadd_rn(__fmul_rn(__fsub_rn(x, m), id), 0.499f)",
        ("tests/kernels/test_kv_append.py::test_blocks_with_ties_zeros_and_tiny_scales",), True,
    ),
    Fault(
        "joined-too-soon", "the first block joins the chunks, not the last",
        "cuda_src/kv/attend.cu",
        "kv_head, last) == last;", "kv_head, last) == 0u;",
        ("tests/kernels/test_kv_attend.py::test_one_launch_equals_two",),
    ),
    Fault(
        "lag-forgotten", "a round on the device does not feed the draft what it has not seen",
        "cuda_src/speculative/loop.cu",
        "const bool lag = n == k && !followed;", "const bool lag = false;",
        ("tests/speculative/test_loop.py::test_equals_plain_greedy_in_one_launch",), True,
    ),
    Fault(
        "follower-lags", "a draft that the target's passes write for is fed what it has",
        "cuda_src/speculative/loop.cu",
        "const bool lag = n == k && !followed;", "const bool lag = n == k;",
        ("tests/speculative/test_loop.py", "tests/speculative/test_followed.py"),
    ),
    Fault(
        "hidden-one-off", "a hidden state is kept at its own position, not one further",
        "cuda_src/speculative/hidden.cu",
        "int64_t(pos_d[0]) + 1 + blockIdx.x", "int64_t(pos_d[0]) + blockIdx.x",
        ("tests/speculative/test_hidden.py",),
    ),
    Fault(
        "head-not-followed", "what the head guessed along stays in its plane",
        "examples/smollm2/generate.py",
        "        self._followed(stream, tokens, n_rows)\n", "",
        ("tests/model/test_head.py::test_rows_are_those_of_a_prompt_that_was_read_at_once",),
    ),
    Fault(
        "chunks-mixed", "rows whose chunks differ are taken together",
        "cuda_src/kv/attend_mma.cu",
        "if (chunk_keys(keys.y - keys.x, n_parts) != chunk) break;", "",
        ("tests/kernels/test_kv_attend_mma.py::test_rows_whose_chunks_differ",),
    ),
    Fault(
        "reference-of-the-others", "scores of another query of the warp move a query's reference",
        "cuda_src/common/attend_step.cuh",
        "for (int apart = 4; apart < WARP_LANES; apart *= 2)\n                highest[c]",
        "for (int apart = 1; apart < WARP_LANES; apart *= 2)\n                highest[c]",
        ("tests/kernels/test_kv_attend_mma.py::test_n_rows_are_n_single_rows",),
    ),
    Fault(
        "masked-by-zero", "a masked key looks like a small weight: infinity times 0 spreads",
        "cuda_src/common/attend_step.cuh",
        "hide(-0.0f);", "hide(0.0f);",
        ("tests/kernels/test_kv_attend_mma.py"
         "::test_one_bad_scale_or_minimum_spoils_its_block_only",),
    ),
    Fault(
        "half-unheeded", "weights of the other half of the keys keep the reference they had",
        "cuda_src/common/attend_values.cuh",
        "exp2_whole(half[1] - reference)};", "1.0f};",
        ("tests/kernels/test_kv_attend_mma.py::test_lengths_around_every_edge",),
    ),
    Fault(
        "pieces-lost", "of rows that no bulk copy takes every other piece is left out",
        "cuda_src/common/pipeline.cuh",
        "x = int(i % PIECES) * PIECE;", "x = int(i % PIECES) / 2 * 2 * PIECE;",
        ("tests/kernels/test_kv_attend_mma.py::test_rows_that_no_bulk_copy_takes",),
    ),
    Fault(
        "slice-without-end", "what lies behind a slice of V is read as it was found",
        "cuda_src/kv/attend_f16.cu",
        "*reinterpret_cast<uint32_t*>(v + SLICE_V + i % WORDS * 4) = 0u;", "(void)v;",
        ("tests/kernels/test_kv_attend_packed.py::test_rows_that_no_bulk_copy_takes_are_clean",),
    ),
    Fault(
        "wild-is-normal", "a minimum that is not finite counts for the size of its key's scales",
        "cuda_src/common/attend_packed.cuh",
        "VF == Q5_1 && !is_wild(m[b]) &&", "VF == Q5_1 &&",
        ("tests/kernels/test_kv_attend_packed.py::test_a_bad_block_does_not_lift_its_neighbours",),
    ),
    Fault(
        "workspace-of-many", "a workspace forgets that few channels make more chunks",
        "memra_lowlevel/kernels/kv_attend.py",
        "few = 2 if n_heads", "few = 1 if n_heads",
        ("tests/kernels/test_kv_attend_plan.py::test_a_workspace_that_names_no_kernel_is_enough_for_all",),
    ),
    Fault(
        "rounds-mixed", "rows whose chunks differ are taken together",
        "cuda_src/common/attend_walk.cuh",
        "if (chunk_keys(keys.y - keys.x, block.n_parts) != chunk) break;", "",
        ("tests/kernels/test_kv_attend_f16.py::test_rows_whose_chunks_differ",),
    ),
    Fault(
        "second-part-lost", "the weights of attention over f16 keep 11 bits",
        "cuda_src/common/attend_f16_parts.cuh",
        "parts[1] = pack_halves((x0 - c0) * finer, (x1 - c1) * finer);", "parts[1] = 0u;",
        ("tests/kernels/test_kv_attend_f16.py::test_lengths_around_every_edge",),
    ),
    Fault(
        "wild-times-zero", "a value that is not finite spoils rows that do not see it",
        "cuda_src/common/attend_f16_step.cuh",
        "two &= ~halves;", "",
        ("tests/kernels/test_kv_attend_f16.py::test_one_bad_value_spoils_its_channel_only",),
    ),
    Fault(
        "wild-unseen", "nobody looks for values that are not finite",
        "cuda_src/common/attend_f16_step.cuh",
        "return (wild & 0x80008000u) != 0u;", "return false;",
        ("tests/kernels/test_kv_attend_f16.py::test_one_bad_value_spoils_its_channel_only",),
    ),
    Fault(
        "rest-of-product-lost", "scale * code keeps the 11 bits of one f16",
        "cuda_src/common/attend_packed.cuh",
        "rest[2 * j + r] = rest_of_product(codes[r], d[j], value[2 * j + r]);",
        "rest[2 * j + r] = 0u;",
        ("tests/kernels/test_kv_attend_f16.py::test_lengths_around_every_edge",),
    ),
    Fault(
        "lift-forgotten", "the weight of a key with a lowered scale is not lifted",
        "cuda_src/common/attend_f16_step.cuh",
        "if (found & LIFTED_KEYS) {", "if (false) {",
        ("tests/kernels/test_kv_attend_packed.py::test_a_value_over_the_range_of_f16",),
    ),
    Fault(
        "wild-block-kept", "a scale that is not finite counts as 0 and spoils nothing",
        "cuda_src/common/attend_f16_step.cuh",
        "if (found & WILD_KEYS) {", "if (false) {",
        ("tests/kernels/test_kv_attend_packed.py"
         "::test_one_bad_scale_or_minimum_spoils_its_block_only",),
    ),
    Fault(
        "bad-key-hidden", "an infinite scale of K gives its key a weight of 0",
        "cuda_src/common/attend_packed.cuh",
        "fmaf(d, 0.0f, d);", "d;",
        ("tests/kernels/test_kv_attend_packed.py"
         "::test_a_bad_scale_of_a_key_spoils_the_rows_that_see_it",),
    ),
    Fault(
        "shares-left-out", "only half of what the warps of a chunk leave is joined",
        "cuda_src/kv/attend_mma.cu",
        "fits ? n_chunks * shares : 0;", "fits ? n_chunks : 0;",
        ("tests/kernels/test_kv_attend_f16.py::test_lengths_around_every_edge",),
    ),
    Fault(
        "minima-lost", "the sums of q5_1 leave without their minima",
        "cuda_src/kv/attend_f16.cu",
        "x[0] = x[0] + base, x[1] = x[1] + base;", "(void)base;",
        ("tests/kernels/test_kv_attend_f16.py::test_lengths_around_every_edge",),
    ),
    Fault(
        "digit-lost", "q beside K q8_0 keeps two digits of three",
        "cuda_src/common/attend_packed.cuh",
        "low[i / 2][i % 2] = digits.of[0];", "low[i / 2][i % 2] = 0u;",
        ("tests/kernels/test_kv_attend_f16.py::test_lengths_around_every_edge",),
    ),
    # -- model ------------------------------------------------------------------------------------
    Fault(
        "argmax-ties", "of equal logits the highest id wins",
        "cuda_src/model/logits.cu",
        "(b.value == a.value && b.id < a.id)", "(b.value == a.value && b.id > a.id)",
        ("tests/model/test_logits.py::test_token_edges",), True,
    ),
    # -- graphs and launches ----------------------------------------------------------------------
    Fault(
        "capture-refusal", "a call that would lose the capture reaches the driver",
        "memra_lowlevel/runtime/recording.py",
        "    if not lifetime.recordings:\n        return\n    recording = _concerned",
        "    return\n    recording = _concerned",
        ("tests/graph/test_graph_capture.py"
         "::test_forbidden_calls_are_refused_before_the_driver_and_poison_nothing",), True,
    ),
    Fault(
        "mirror-not-advanced", "a replay moves the device counter and not its host mirror",
        "memra_lowlevel/graph/effects.py",
        "        c.lower = max(0, c.lower + self.add_lower)\n        c.upper += self.add_upper\n",
        "",
        ("tests/graph/test_graph_counters.py::test_eager_writes_move_both",), True,
    ),
    Fault(
        "room-unchecked", "a launch goes out though its counter has no room",
        "memra_lowlevel/graph/effects.py",
        "if c.upper + self.need > c.capacity:", "if False:",
        ("tests/graph/test_graph_counters.py"
         "::test_what_does_not_fit_is_refused_before_anything_moves",), True,
    ),
    Fault(
        "argument-size", "a parameter's size in the source and in the code may differ",
        "memra_lowlevel/compile/module.py",
        "if expected and expected != size:", "if False:",
        ("tests/compile/test_compile_module.py::test_contradictions_are_refused",), True,
    ),
    # -- compilation ------------------------------------------------------------------------------
    Fault(
        "checksum-unchecked", "a damaged file of the kernel cache is loaded",
        "memra_lowlevel/compile/cache.py",
        "if parts[2] != _checksum(body):", "if False:",
        ("tests/compile/test_compile_cache.py::test_damage_is_rebuilt_with_one_line",), True,
    ),
    Fault(
        "includes-not-in-key", "a changed header does not change the cache key",
        "memra_lowlevel/compile/source.py",
        "for part_name, part in [(main, rewritten), *reader.headers.items()]:",
        "for part_name, part in [(main, rewritten)]:",
        ("tests/compile/test_compile_cache.py::test_a_changed_header_compiles_again",), True,
    ),
    Fault(
        "changed-compiler-believed", "another NVRTC under the same path counts as the old one",
        "memra_lowlevel/compile/nvrtc.py",
        'if known["identity"] != _identity(known["path"]):', "if False:",
        ("tests/compile/test_compile_warm.py::test_a_changed_library_is_not_believed",), True,
    ),
    # -- rules of the tree ------------------------------------------------------------------------
    Fault(
        "import-upwards", "the driver imports the cache",
        "memra_lowlevel/driver/trace.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\n\ndef up():\n    from ..cache import KvLayer\n",
        ("tests/test_layers.py::test_every_import_goes_downwards",), True,
    ),
    Fault(
        "table-unchecked", "a table of a document may differ from its result file",
        "memra_lowlevel/bench/tables.py",
        "        elif fresh != text:", "        elif False:",
        ("tests/bench/test_tables.py",), True,
    ),
    Fault(
        "older-source-unmarked", "a figure stays as it is when its kernel changes",
        "memra_lowlevel/bench/result.py",
        "kept != sources.digest_of(group)", "False",
        ("tests/bench/test_tables.py",), True,
    ),
    Fault(
        "seal-unchecked", "a result file edited by hand is taken",
        "memra_lowlevel/bench/result.py",
        'if body.get("seal") != _seal(body):', "if False:",
        ("tests/bench/test_result.py",), True,
    ),
    Fault(
        "loss-unseen", "a benchmark may lose half of its share of the ceiling",
        "memra_lowlevel/bench/regress.py",
        "LIMIT = 0.05", "LIMIT = 0.5",
        ("tests/bench/test_regress.py",), True,
    ),
    Fault(
        "runs-apart-unseen", "two runs may differ by half and are said to agree",
        "memra_lowlevel/bench/agree.py",
        "BOUND = 0.03", "BOUND = 0.5",
        ("tests/bench/test_agree.py",), True,
    ),
    Fault(
        "others-too-early", "other libraries are loaded while rows of ours are still measured",
        "memra_lowlevel/bench/run.py",
        "            self._later.append((self.group, measure))", "            measure()",
        ("tests/bench/test_command.py",), True,
    ),
    Fault(
        "unlike-compared", "a row beside other libraries is compared with one without",
        "memra_lowlevel/bench/agree.py",
        "        return None in self.loaded or self.loaded[0] == self.loaded[1]",
        "        return True",
        ("tests/bench/test_agree.py",), True,
    ),
    Fault(
        "one-run-twice", "a run is compared with itself",
        "memra_lowlevel/bench/agree.py",
        "    if first.seal == second.seal:", "    if False:",
        ("tests/bench/test_agree.py",), True,
    ),
    Fault(
        "view-open", "a checked kernel may leave the view that it was given",
        "memra_lowlevel/driver/host/views.py",
        "            if n_bytes is None or n_bytes == block.n_bytes:", "            if True:",
        ("tests/driver/test_host_views.py",), True,
    ),
    Fault(
        "silent-end", "a process ends without a word of work that nobody waited for",
        "memra_lowlevel/runtime/__init__.py",
        "atexit.register(tell)", "atexit.unregister(tell)",
        ("tests/runtime/test_runtime_unseen.py",), True,
    ),
    Fault(
        "copies-uncounted", "copies and memory sets do not count towards a full queue",
        "memra_lowlevel/runtime/storage.py",
        "        native.note_issued(stream.cell)", "        pass",
        ("tests/native/test_native_lock.py::test_work_that_goes_through_python_counts_too",),
        True,
    ),
    Fault(
        "request-noted-in-part", "what is loaded already is left out of a noted request",
        "memra_lowlevel/kernels/registry.py",
        "        _note(device.arch, keys)\n", "",
        ("tests/compile/test_compile_recorded.py"
         "::test_a_request_is_noted_whole_though_a_part_is_loaded",), True,
    ),
    Fault(
        "loss-forgiven", "the check on a GPU is green though a benchmark lost its share",
        "tools/gpu_check.py",
        'return {"ok": not lost, "passed"', 'return {"ok": True, "passed"',
        ("tests/bench/test_gpu_check.py",), True,
    ),
    Fault(
        "skip-forgiven", "the check on a GPU is green though tests were skipped",
        "tools/gpu_check.py",
        '"ok": not failures and not skipped and', '"ok": not failures and',
        ("tests/bench/test_gpu_check.py",), True,
    ),
    # -- launches and figures ---------------------------------------------------------------------
    Fault(
        "launch-bounds-forgotten", "the host device launches more threads than a kernel's bounds",
        "memra_lowlevel/driver/host/cxx.py",
        "    if bounds:\n        translated, bounded", "    if False:\n        translated, bounded",
        ("tests/runtime/test_runtime_launch.py::"
         "test_a_block_beyond_the_launch_bounds_of_its_kernel",), True,
    ),
    Fault(
        "late-buffers-unchecked", "a second launch of attention refuses behind the first",
        "memra_lowlevel/kernels/kv_attend.py",
        "        if dtype is None:\n            continue", "        if True:\n            continue",
        ("tests/kernels/test_kv_attend.py",), True,
    ),
    Fault(
        "window-forgotten", "the blocks of attention follow the plane, not the window",
        "memra_lowlevel/kernels/kv_attend_mma.py",
        "min(rows, call.window or rows)", "rows",
        ("tests/kernels/test_kv_attend_mma.py::"
         "test_a_window_over_a_long_plane_is_launched_like_a_short_plane",), True,
    ),
    Fault(
        "asleep", "a sample is taken by a device that a rest has put to sleep",
        "memra_lowlevel/bench/clock.py",
        "                time.sleep(_REST * 2 * ms / 1e3)\n                replay()\n",
        "                time.sleep(_REST * 2 * ms / 1e3)\n",
        ("tests/bench/test_steady.py::test_the_replay_that_wakes_a_rested_device_does_not_count",),
        True,
    ),
    Fault(
        "disturbed-ceiling", "the last turn of a ceiling counts, whatever disturbed it",
        "memra_lowlevel/bench/ceilings.py",
        "best = min(turns, key=median)", "best = turns[-1]",
        ("tests/bench/test_command.py::test_of_each_ceiling_the_fastest_turn_counts",), True,
    ),
    Fault(
        "next-chunk-mistaken", "of chunks of one step the next one but one is asked for too early",
        "cuda_src/kv/attend_mma.cu",
        "if (behind >= chunk) number += gridDim.x, behind -= chunk;", "",
        ("tests/kernels/test_kv_attend_mma.py::test_a_block_asks_for_its_chunks_in_their_order",),
    ),
    Fault(
        "blocks-of-few-everywhere", "blocks take few queries where the device has no room for them",
        "memra_lowlevel/kernels/kv_attend_simt.py",
        "if kind != \"host\" and in_few <= _RESIDENT * n_sms:", "if kind != \"host\":",
        ("tests/kernels/test_kv_attend_plan.py::"
         "test_blocks_take_few_queries_where_the_device_has_room_for_them",), True,
    ),
    Fault(
        "no-rest", "a device at its power limit is measured", "memra_lowlevel/bench/clock.py",
        "_REST = 3.0", "_REST = 0.0", ("tests/bench/test_steady.py",), True,
    ),
    Fault(
        "compiler-imported", "whatever launches loads the compiler",
        "memra_lowlevel/compile/__init__.py",
        "from ..lazy import attach", "from . import compiler\nfrom ..lazy import attach",
        ("tests/test_conventions.py::test_import_is_light_and_makes_no_cuda_call",), True,
    ),
)  # fmt: skip
"""Every fault; ``cheap`` ones are tried in CI."""


def applies(fault: Fault, root: Path = ROOT) -> int:
    """How often the text of a fault occurs; 1 is right."""
    path = root / fault.path
    return path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Give a copy of what the tests need, compiled modules included."""
    with tempfile.TemporaryDirectory(prefix="memra-gate-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.gguf")
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, copy / part)
        # An editable install would find this package of ours in the tree itself.
        (copy / "memra_lowlevel" / "examples").symlink_to(copy / "examples")
        yield copy


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Have the fault in the copy for a while."""
    path = copy / fault.path
    good = path.read_text(encoding="utf-8")
    if good.count(fault.old) != 1:
        raise SystemExit(
            f"gate: {fault.name}: its text occurs {good.count(fault.old)} times in {fault.path}, "
            "not once; bring the fault up to date"
        )
    path.write_text(good.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(good, encoding="utf-8")


def pytest_status(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of the copy; the status of pytest and the end of what it said."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=copy, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr)[-1500:]


def red(fault: Fault, copy: Path) -> str:
    """Why the fault was not caught; empty when the tests turned red."""
    with planted(fault, copy):
        status, tail = pytest_status(copy, fault.tests)
    if status == 1:
        return ""
    said = {0: "the tests still pass", 5: "there are no such tests"}
    return f"{said.get(status, f'pytest ended with status {status}')}\n{tail if status else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--break", dest="names", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--list", action="store_true", help="list the faults")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for fault in FAULTS:
            print(f"{fault.name:22} {fault.about}  [{', '.join(fault.tests)}]")
        return 0
    names = [fault.name for fault in FAULTS] if chosen.all else chosen.names
    if unknown := set(names) - {fault.name for fault in FAULTS} or not names:
        parser.error(f"name faults of --list, not {unknown}" if names else "--break NAME or --all")
    faults = [fault for fault in FAULTS if fault.name in names]
    failed = 0
    with copy_of_the_tree() as copy:
        status, tail = pytest_status(copy, sorted({t for fault in faults for t in fault.tests}))
        if status:
            print(f"gate: the tests are not green to begin with (status {status})\n{tail}")
            return 1
        for fault in faults:
            start = time.monotonic()
            why = red(fault, copy)
            failed += bool(why)
            verdict = f"NOT CAUGHT: {why}" if why else "caught"
            print(f"{fault.name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
