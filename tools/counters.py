"""Counters of the GPU for one launch of the kernel behind each missed goal.

    python tools/counters.py [--only REGEX] [--json FILE] [--budget-s N]
    python tools/counters.py --list

Runs ``ncu`` (Nsight Compute) over the cases below and writes one result file,
``benchmarks/results/<date>-counters.json``, for the table ``counters`` of docs/performance.md.
What is counted is ``memra_lowlevel.bench.counters.METRICS``. Several cases share a process under
``ncu``, which counts what is launched between cuProfilerStart and cuProfilerStop: for each row of
the benchmark an empty kernel whose grid is the number of the row, then the work, once it has run
uncounted. What ``ncu`` prints is told apart by these marks, however many launches a row has.

* Clocks stay as the machine has them (``--clock-control none``): times and shares are those of the
  clocks at which the benchmark runs, and nobody's settings are touched. Times of two files do not
  compare; counts and shares do.
* Caches are emptied before every pass (``--cache-control all``), as the benchmark's rotating
  buffers leave them. The combination of attention, which reads what the kernel before it wrote, is
  counted with the caches as that one left them (``none``). In a token activations come from the L2
  cache; here they come from memory.
* A kernel runs alone under ``ncu``: nothing starts early, nothing overlaps.

A metric that ``ncu`` does not give is null in the file and named in its row. Status 0: all was
counted; 1: something failed; 3: the budget ended before everything was begun.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from words import seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memra_lowlevel.bench import counters
from memra_lowlevel.bench.attend import CASES as ATTEND
from memra_lowlevel.bench.attend import ROWS, Case, device_rows, fill, halves, normal, planes

if TYPE_CHECKING:
    from memra_lowlevel import Device
    from memra_lowlevel.bench.run import Run

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "attend_(mma|f16|partial)"
COMBINATION = "attend_(mma_)?combine"
TOKEN = "token smollm2-shape"
VERIFY = "verification of 5 rows smollm2-shape"
MARK = "counters_mark"
MARK_SOURCE = f"""#include "common/device.cuh"
KERNEL void {MARK}(int32_t* NULLABLE nothing) {{}}
"""
PER_PROCESS = 6
# A process, and a case of it: what must be left of the budget to begin with them.
PROCESS_S, CASE_S = 12.0, 3.0
NCU_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


@dataclass(frozen=True)
class Counted:
    """One launch to count.

    Attributes
    ----------
    row : str
        The row of a benchmark's result file whose work is done, or a verification of several rows.
    kernel : str
        Pattern of the whole name of the kernel, without template and arguments.
    part : str
        What of the row's work it is, where it is not all; belongs to the name in the file.
    nth : int
        Which launch of such kernels.
    cache : str
        ``all``: emptied before each pass; ``none``: as the kernel before left them.
    """

    row: str
    kernel: str
    part: str = ""
    nth: int = 0
    cache: str = "all"

    @property
    def what(self) -> str:
        return f"{self.row}: {self.part}" if self.part else self.row


CASES = (
    Counted("attend 32/8/128 ctx 4096, q8_0/q5_1", ATTENTION),
    Counted("attend 32/8/128 ctx 32768, q8_0/q5_1", ATTENTION),
    Counted("attend 32/8/128 ctx 131072, q8_0/q5_1", ATTENTION),
    Counted("attend 32/8/128 ctx 524288, q8_0/q5_1", ATTENTION),
    Counted("attend 32/8/128 ctx 1048576, q8_0/q5_1", ATTENTION),
    Counted("attend 64/8/128 ctx 32768, q8_0/q5_1", ATTENTION),
    Counted("attend 64/8/128 ctx 131072, q8_0/q5_1", ATTENTION),
    Counted("attend 40/8/128 ctx 131072, q8_0/q5_1", ATTENTION),
    Counted("attend 16/2/256 ctx 4096, q8_0/q5_1", ATTENTION),
    Counted("attend 16/2/256 ctx 32768, q8_0/q5_1", ATTENTION),
    Counted("attend 16/2/256 ctx 131072, q8_0/q5_1", ATTENTION),
    Counted("attend 32/8/128 ctx 32768, q8_0/q8_0", ATTENTION),
    Counted("attend 32/8/128 ctx 131072, q8_0/q8_0", ATTENTION),
    Counted("attend 32/8/128 ctx 32768, q8_0/q4_0", ATTENTION),
    Counted("attend 32/8/128 ctx 131072, q8_0/q4_0", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 2, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 4, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 8, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 16, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 2, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 4, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 8, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 16, q8_0/q5_1", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 8, q8_0/q8_0", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 8, q8_0/q8_0", ATTENTION),
    Counted("rows 32/8/128 ctx 32768 rows 8, f16/f16", ATTENTION),
    Counted("rows 32/8/128 ctx 131072 rows 8, f16/f16", ATTENTION),
    Counted("append 8x128, 16 rows, q8_0/q5_1", "append_\\w+"),
    Counted("recur 32x128x128, 1 tokens", "delta_rows"),
    Counted("recur 32x128x128, 4 tokens", "delta_rows"),
    Counted("recur 32x128x128, 8 tokens", "delta_rows"),
    Counted(TOKEN, "embed_rows", "embedding"),
    Counted(TOKEN, "qkv_rows", "q/k/v 960x576"),
    Counted(TOKEN, ATTENTION, "attention 9/3/64, 64 keys"),
    Counted(TOKEN, "add_product", "out 576x576"),
    Counted(TOKEN, "gate_up_rows", "gate and up 3072x576"),
    Counted(TOKEN, "add_product", "down 576x1536", nth=1),
    Counted(TOKEN, "logits_rows", "logits 49152x576"),
    Counted(TOKEN, "pick_rows", "token of 1536 tiles"),
    Counted(VERIFY, "qkv_rows", "q/k/v 960x576"),
    Counted(VERIFY, ATTENTION, "attention 9/3/64, 68 keys"),
    Counted(VERIFY, "add_product", "out 576x576"),
    Counted(VERIFY, "gate_up_rows", "gate and up 3072x576"),
    Counted(VERIFY, "add_product", "down 576x1536", nth=1),
    Counted(VERIFY, "logits_rows", "logits 49152x576"),
    Counted("attend 32/8/128 ctx 4096, q8_0/q5_1", COMBINATION, "combination", cache="none"),
    Counted("attend 32/8/128 ctx 131072, q8_0/q5_1", COMBINATION, "combination", cache="none"),
)
"""What is counted, in the order of the table; ``opened`` finds the work by the row's name."""


# -- the work, in the process under ncu -----------------------------------------------------------
@contextlib.contextmanager
def opened(run: Run, row: str) -> Iterator[Callable[[], None]]:
    """Give the call that does the work of a row of the benchmark once."""
    if row in (TOKEN, VERIFY):
        inside = _pass(run, 5 if row == VERIFY else 1)
    elif row.startswith("append "):
        inside = _append(run, row)
    elif row.startswith("recur "):
        inside = _recur(run, row)
    else:
        known = {f"attend {c.what}": c for c in ATTEND} | {f"rows {c.what}": c for c in ROWS}
        if row not in known:
            raise LookupError(f"no row of the benchmark is called {row!r}")
        inside = _attend(run, known[row])
    with inside as call:
        yield call


@contextlib.contextmanager
def _attend(run: Run, case: Case) -> Iterator[Callable[[], None]]:
    with planes(run, case, 1) as ((layer,), lengths):
        fill(run, case, [layer], lengths)
        queries = normal((case.n_rows, case.n_heads, case.head_dim), 1)
        q = run.device.from_numpy(queries, run.stream)
        out = run.device.empty(q.shape, np.float32, run.stream)
        yield lambda: layer.attend(run.stream, q, out, programmatic=True, settled=True)
        run.stream.sync()
        q.close()
        out.close()


@contextlib.contextmanager
def _append(run: Run, row: str) -> Iterator[Callable[[], None]]:
    shape = re.match(r"append (\d+)x(\d+), (\d+) rows, q8_0/q5_1$", row)
    if shape is None:
        raise LookupError(f"no append is called {row!r}")
    n_kv_heads, head_dim, n_rows = (int(n) for n in shape.groups())
    with planes(run, Case(n_kv_heads, n_kv_heads, head_dim, n_rows), 1) as ((layer,), _):
        both = device_rows(run, n_rows, n_kv_heads * head_dim, 0)
        yield lambda: layer.append(run.stream, *halves(both, n_rows))
        run.stream.sync()
        both.close()


@contextlib.contextmanager
def _recur(run: Run, row: str) -> Iterator[Callable[[], None]]:
    from memra_lowlevel.bench import recur

    with contextlib.ExitStack() as stack:
        (call,) = recur.steps(run, int(row.split()[2]), 1, stack)(False)
        yield call
        run.stream.sync()


@contextlib.contextmanager
def _pass(run: Run, n_rows: int) -> Iterator[Callable[[], None]]:
    """One block of the SmolLM2 shape between embedding and tokens: each kernel as a pass has it."""
    from memra_lowlevel.demo import engine

    smollm2, stream = engine(), run.stream
    weights = smollm2.tiny.made_up(TOKEN.removeprefix("token "))
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, n_layers=1))
    model = smollm2.Model(run.device, stream, weights, max_ctx=256)
    session = smollm2.Session.allocate(model, stream, 256, n_rows_max=16)
    session.prime(stream, list(range(3, 66)))  # the token's row is the 64th
    session.planes.prepare(stream, n_rows)
    tok_d = session.ws.tok_d.view(0, (n_rows,), np.uint32)
    yield lambda: session.forward(stream, tok_d, n_rows, session.ws.argmax_d)
    stream.sync()
    session.close()


def launch_all(rows: Sequence[str], device_name: str) -> int:
    """Do the work of some rows, each counted once behind its mark; 1 if one failed."""
    from memra_lowlevel import Device
    from memra_lowlevel.bench.run import Run
    from memra_lowlevel.compile import compile_source
    from memra_lowlevel.runtime.launch import LaunchConfig, launch

    failed = False
    with Device(device_name) as device, device.stream(name="counters") as stream:
        run = Run(device, stream, peers=False)
        image = compile_source(MARK_SOURCE, arch=device.arch, name="counters_mark.cu")
        with device.module(image) as module:
            mark = module.kernel(MARK)
            for number, row in enumerate(rows, 1):
                try:
                    with opened(run, row) as call:
                        call()
                        stream.sync()
                        with _profiled(device):
                            launch(stream, LaunchConfig(number, 32), mark, None)
                            call()
                            stream.sync()
                except Exception as error:
                    failed = True
                    print(f"counters: {row}: {type(error).__name__}: {error}", flush=True)
    return int(failed)


@contextlib.contextmanager
def _profiled(device: Device) -> Iterator[None]:
    """Have ncu count what is launched inside; what fails inside ends that too."""
    if device.kind != "cuda":
        yield
        return
    from cuda.bindings import driver

    device.ctx.activate()
    _checked(driver.cuProfilerStart)
    try:
        yield
    finally:
        _checked(driver.cuProfilerStop)


def _checked(call: Callable[[], Any]) -> None:
    (status,) = call()
    if int(status) != 0:
        raise RuntimeError(f"{call.__name__}: {status!r}")


# -- ncu ------------------------------------------------------------------------------------------
def find_ncu() -> str:
    """Path of ``ncu``; ends the program where there is none."""
    for place in ("ncu", *NCU_PLACES):
        if found := shutil.which(place):
            return found
    raise SystemExit(
        "counters: ncu (Nsight Compute, of the CUDA toolkit) was found neither on PATH nor at "
        + " or ".join(NCU_PLACES)
    )


def batches(cases: Sequence[Counted]) -> list[list[Counted]]:
    """Cases that share a process under ncu: one setting of the caches, few enough to be lost."""
    found: list[list[Counted]] = []
    rows: list[str] = []
    for case in cases:
        same = bool(found) and found[-1][0].cache == case.cache
        if not same or (case.row not in rows and len(rows) == PER_PROCESS):
            found.append([])
            rows = []
        found[-1].append(case)
        rows += [case.row] * (case.row not in rows)
    return found


def ncu_options(cases: Sequence[Counted], metrics: Sequence[str], log: Path) -> list[str]:
    """Options of one call of ncu, up to the program."""
    names = "|".join(dict.fromkeys([MARK, *(case.kernel for case in cases)]))
    return [
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        "--profile-from-start", "off", "--clock-control", "none",
        "--cache-control", cases[0].cache, "--kernel-name", f"regex:^({names})$",
        "--metrics", ",".join(metrics),
    ]  # fmt: skip


def count(
    ncu: str, cases: Sequence[Counted], device: str, limit_s: float
) -> tuple[list[counters.Launched], str]:
    """Run one process under ncu; what it counted, and what it and the program said.

    Metrics that this ncu refuses by name are left out of a second attempt. Raises TimeoutExpired.
    """
    deadline = time.monotonic() + limit_s
    rows = list(dict.fromkeys(case.row for case in cases))
    metrics: Sequence[str] = counters.METRICS
    while True:
        with tempfile.TemporaryDirectory() as tmp:
            log = Path(tmp) / "ncu.log"
            said = _run(
                [ncu, *ncu_options(cases, metrics, log), sys.executable, str(Path(__file__)),
                 "--device", device, "--launch", *rows],
                max(1.0, deadline - time.monotonic()),
            )  # fmt: skip
            text = log.read_text(errors="replace") if log.exists() else ""
        found = counters.parse(text)
        said = "\n".join([*(line for line in text.splitlines() if line.startswith("==")), said])
        refused = {
            name for name in metrics
            if re.search(rf"^==(ERROR|WARNING)==.*{re.escape(name)}(?![\w.])", said, re.MULTILINE)
        }  # fmt: skip
        if found or not refused or len(refused) == len(metrics):
            return found, said
        metrics = [m for m in metrics if m not in refused]


def _run(command: Sequence[str], limit_s: float) -> str:
    """Run a command in a session of its own, so that what it started ends with it."""
    # ncu writes numbers as the language has them; C's has a point and nothing else.
    environment = {**os.environ, "LC_ALL": "C"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return said


def by_mark(found: Sequence[counters.Launched]) -> dict[int, list[counters.Launched]]:
    """Launches by the number of the mark before them."""
    parts: dict[int, list[counters.Launched]] = {}
    here: list[counters.Launched] = []
    for launched in found:
        if launched.function == MARK:
            here = parts.setdefault(launched.grid[0] if launched.grid else 0, [])
        else:
            here.append(launched)
    return parts


def pick(cases: Sequence[Counted], found: Sequence[counters.Launched]) -> list[tuple[Counted, Any]]:
    """Each case with its row, or with why there is none."""
    parts = by_mark(found)
    rows = list(dict.fromkeys(case.row for case in cases))
    answers: list[tuple[Counted, Any]] = []
    for case in cases:
        here = parts.get(rows.index(case.row) + 1, [])
        fitting = [one for one in here if re.fullmatch(case.kernel, one.function)]
        row: Any = "ncu gave no time"
        if case.nth >= len(fitting):
            row = f"launch {case.nth} of {case.kernel!r} is not among {[o.function for o in here]}"
        elif made := counters.row_of(case.what, fitting[case.nth], cache=case.cache):
            row = made
        answers.append((case, row))
    return answers


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", type=pattern, default=re.compile(""), metavar="REGEX",
        help="cases whose name has it",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result file")
    parser.add_argument("--budget-s", type=seconds, default=480.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--launch", nargs="+", metavar="ROW", help="do the work, under ncu")
    arguments = parser.parse_args()
    if arguments.launch:
        return launch_all(arguments.launch, arguments.device)
    cases = [case for case in CASES if arguments.only.search(case.what)]
    if not cases:
        raise SystemExit(f"counters: no case has {arguments.only.pattern!r}; --list shows them")
    if arguments.list:
        print("\n".join(case.what for case in cases))
        return 0
    name = f"{time.strftime('%Y-%m-%d')}-counters.json"
    path = arguments.json or ROOT / "benchmarks" / "results" / name
    return measure(cases, path, arguments.device, arguments.budget_s)


def measure(cases: Sequence[Counted], path: Path, device_name: str, budget_s: float) -> int:
    """Count the cases into a result file, which is written after each process."""
    from memra_lowlevel import Device, errors
    from memra_lowlevel.bench import result

    start = time.monotonic()
    ncu = find_ncu()
    try:
        with Device(device_name) as device:
            if device.kind != "cuda":
                raise SystemExit(f"counters: {device} is no GPU, and ncu counts only there")
            about = result.environment(device)
    except errors.MemraError as error:
        raise SystemExit(f"counters: no GPU {device_name}: {error}") from error
    version = re.search(r"Version (\S+)", _run([ncu, "--version"], 60.0))
    about["profiler"] = {
        "ncu": version[1] if version else None, "clock_control": "none",
        "metrics": list(counters.METRICS),
    }  # fmt: skip
    rows: list[result.Row] = []
    bad: list[str] = []
    left: list[str] = []
    for batch in batches(cases):
        room = budget_s - (time.monotonic() - start)
        answers: list[tuple[Counted, Any]] = []
        if room < PROCESS_S + CASE_S * len(batch):
            left += [case.what for case in batch]
            continue
        try:
            found, said = count(ncu, batch, device_name, room)
            answers = pick(batch, found)
        except subprocess.TimeoutExpired:
            left += [case.what for case in batch]
            print(f"counters: {batch[0].what} and {len(batch) - 1} more: not within the budget")
            continue
        for case, row in answers:
            if isinstance(row, str):
                bad.append(f"{case.what}: {row}")
                print(f"counters: {bad[-1]}", flush=True)
                continue
            rows.append(row)
            short = ", ".join(name.split(".")[0] for name in row.extra["missing"])
            print(" | ".join(counters.cells(row)) + (f" | not given: {short}" if short else ""),
                  flush=True)  # fmt: skip
        if any(isinstance(row, str) for _, row in answers):
            print("    " + said.strip()[-2000:].replace("\n", "\n    "), flush=True)
        notes = [*bad, *(f"{what}: not within the budget" for what in left)]
        result.write(path, rows, about=about, notes=notes)
    notes = [*bad, *(f"{what}: not within the budget" for what in left)]
    result.write(path, rows, about=about, notes=notes)
    print(f"counters: {len(rows)} rows in {path}")
    if bad:
        print(f"counters: failed: {len(bad)}")
    if left:
        print(f"counters: left for another call: {', '.join(left)}")
    return 1 if bad else (3 if left else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
