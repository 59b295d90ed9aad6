"""Note what the tests for a GPU ask of the compiler, on a machine without one.

``python tools/record_jobs.py FOLDER [pytest words]`` runs the host twin of every test marked gpu
(the same test, so the same instances), notes the ``SOURCE`` of modules that run on a GPU alone, and
runs ``tools/small_run.py``. Each request is noted (memra_lowlevel/compile/recorded.py), and then
``tools/build_cubins.py OUT --recorded FOLDER`` makes a store of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memra_lowlevel.compile import Job, recorded  # noqa: E402


class Twins:
    """Choose the host twins of tests marked gpu; note sources of tests that have no twin."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        wanted = {name.replace(a, b) for item in gpu for name in [item.nodeid]
                  for a, b in (("cuda:0", "host"), ("cuda", "host"))}  # fmt: skip
        items[:] = [i for i in items if i.nodeid in wanted and not i.get_closest_marker("gpu")]
        alone = {item.module for item in gpu} - {item.module for item in items}  # type: ignore[attr-defined]
        for module in alone:
            if isinstance(source := getattr(module, "SOURCE", None), str):
                recorded.note(Job(source, "host", name="gpu_tests.cu"))


def main(words: list[str]) -> int:
    if not words:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    os.environ[recorded.VARIABLE] = str(Path(words[0]).resolve())
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *words[1:]], [Twins()])
    small = [sys.executable, str(ROOT / "tools" / "small_run.py"), "--device", "host"]
    return int(status) or subprocess.run(small, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
