from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memra_lowlevel.compile import (
    CompiledImage,
    KernelCache,
    cache,
    compile_source,
    compiler,
    nvrtc,
)

Unprivileged = Callable[[], contextlib.AbstractContextManager[None]]
NAMES = ["scale<64, float>"]


def build(text: str, disk: KernelCache, **more: object) -> CompiledImage:
    """Compile with nothing kept in the memory of this process, so that the disk answers."""
    compiler.clear_memory()
    settings: dict[str, object] = {"arch": "sm_80", "name_expressions": NAMES, **more}
    return compile_source(text, cache=disk, **settings)  # type: ignore[arg-type]


def the_file(disk: KernelCache) -> Path:
    (path,) = disk.folder.glob("*.kernel")
    return path


def test_everything_comes_back_from_disk(sample: str, disk: KernelCache) -> None:
    first = build(sample, disk, name="kv/scale.cu")
    second = build(sample, disk, name="kv/scale.cu")
    assert (first.origin, second.origin) == ("compiled", "disk")
    assert dataclasses.replace(second, origin="compiled") == first
    assert second.entries["scale<64, float>"].startswith("_Z5scaleILi64Ef")
    assert the_file(disk).name == f"kv.scale-sm_80-{first.key[:24]}.kernel"
    head, line, payload = the_file(disk).read_bytes().split(b"\n", 2)
    assert head.startswith(b"memra-kernel 1 ") and json.loads(line)["key"] == first.key
    assert payload == first.data


def test_memory_answers_first(sample: str, disk: KernelCache) -> None:
    first = compile_source(sample, arch="sm_80", cache=disk)
    second = compile_source(sample, arch="sm_80", cache=disk)
    assert second.origin == "memory" and second.data is first.data


def test_what_the_key_depends_on(sample: str, disk: KernelCache, tmp_path: Path) -> None:
    keys = {"base": build(sample, disk).key}
    keys["arch"] = build(sample, disk, arch="sm_86").key
    keys["suffix"] = build(sample, disk, arch="sm_90").key
    keys["variant"] = build(sample, disk, arch="sm_90a").key
    keys["flags"] = build(sample, disk, options={"lineinfo": True}).key
    keys["define"] = build(sample, disk, defines={"A": 1}).key
    keys["names"] = build(sample, disk, name_expressions=["scale<32, float>"]).key
    keys["more names"] = build(sample, disk, name_expressions=[*NAMES, "scale<32, float>"]).key
    keys["text"] = build(sample + "\n", disk).key
    keys["name"] = build(sample, disk, name="other.cu").key
    assert len(set(keys.values())) == len(keys)
    # What it does not depend on: the order of names and defines, an unused folder, the cache.
    both = ["scale<32, float>", *NAMES]
    assert build(sample, disk, name_expressions=both).key == keys["more names"]
    assert build(sample, disk, include_dirs=[tmp_path]).key == keys["base"]
    one = build(sample, disk, defines={"A": 1, "B": 2}).key
    assert build(sample, disk, defines={"B": "2", "A": "1"}).key == one


def test_another_build_of_the_compiler_is_another_compiler(
    sample: str, disk: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(sample, disk)
    real = nvrtc.library()
    for change in ({"digest": "0" * 40}, {"version": (12, 8)}):
        other = dataclasses.replace(real, **change)
        monkeypatch.setattr(nvrtc, "library", lambda other=other: other)
        changed = build(sample, disk)
        assert changed.origin == "compiled" and changed.key != first.key


def test_digest_of_the_library_is_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "cache"))
    library, builtins = tmp_path / "libnvrtc.so.12", tmp_path / "libnvrtc-builtins.so.12.9"
    library.write_bytes(b"one")
    builtins.write_bytes(b"two")
    first = nvrtc._library_digest(str(library))
    assert nvrtc._library_digest(str(library)) == first
    stamp = builtins.stat()
    builtins.write_bytes(b"TWO")
    os.utime(builtins, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert nvrtc._library_digest(str(library)) != first
    builtins.write_bytes(b"two")
    assert nvrtc._library_digest(str(library)) == first
    (memo,) = (tmp_path / "cache" / "libraries").iterdir()
    memo.write_text("{")
    assert nvrtc._library_digest(str(library)) == first


def test_a_changed_header_compiles_again(disk: KernelCache, tmp_path: Path) -> None:
    header = tmp_path / "inner" / "deep.cuh"
    header.parent.mkdir()
    (tmp_path / "outer.cuh").write_text('#include "inner/deep.cuh"\n')
    header.write_text("#define VALUE 1\n")
    stamp = header.stat()
    text = '#include "outer.cuh"\nextern "C" __global__ void k(int* a) { *a = VALUE; }\n'
    settings = {"name_expressions": [], "include_dirs": [tmp_path]}
    first = build(text, disk, **settings)
    assert build(text, disk, **settings).origin == "disk"
    header.write_text("#define VALUE 2\n")
    os.utime(header, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = build(text, disk, **settings)
    assert second.origin == "compiled" and second.data != first.data


@pytest.mark.parametrize(
    "where", ["magic", "version", "checksum", "header", "payload", "cut", "empty"]
)
def test_damage_is_rebuilt_with_one_line(
    sample: str, disk: KernelCache, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(sample, disk)
    path = the_file(disk)
    data = bytearray(path.read_bytes())
    lines = [0, data.index(b"\n") + 1]
    lines.append(data.index(b"\n", lines[1]) + 1)
    if where in ("cut", "empty"):
        del data[0 if where == "empty" else -1 :]
    else:
        at = {"magic": 0, "version": 13, "checksum": 20, "header": lines[1] + 30}
        data[at.get(where, len(data) - 100)] ^= 1
    path.write_bytes(data)
    (entry,) = disk.entries(verify=True)
    assert entry.problem and disk.entries()[0].problem == ""
    again = build(sample, disk)
    assert again.origin == "compiled" and again.data == first.data
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in record.getMessage() and "compiling again" in record.getMessage()
    assert build(sample, disk).origin == "disk"
    assert disk.entries(verify=True)[0].problem == ""


def test_a_file_under_another_files_name_is_damage(sample: str, disk: KernelCache) -> None:
    first = build(sample, disk)
    path = the_file(disk)
    build(sample + "\n", disk)
    (other,) = [p for p in disk.folder.glob("*.kernel") if p != path]
    path.write_bytes(other.read_bytes())
    assert [e.problem for e in disk.entries(verify=True) if e.path == path] != [""]
    again = build(sample, disk)
    assert again.origin == "compiled" and again.key == first.key


def test_a_valid_checksum_over_nonsense_is_damage(disk: KernelCache) -> None:
    for body in (b"{}\n", b"[]\n", b"\xff\n", b'{"kind": 1}\nabc'):
        with pytest.raises(cache.Damage):
            cache.decode(b"memra-kernel 1 " + cache._checksum(body) + b"\n" + body)


def test_read_only_folder(
    sample: str, public: Path, caplog: pytest.LogCaptureFixture, unprivileged: Unprivileged
) -> None:
    nvrtc.library()
    filled, empty = public / "filled", public / "empty"
    build(sample, KernelCache(filled))
    empty.mkdir()
    for folder in (filled, filled / "locks", empty, public):
        folder.chmod(0o555)
    caplog.clear()
    with unprivileged():
        assert build(sample, KernelCache(filled)).origin == "disk"
        assert not caplog.records
        disk = KernelCache(empty)
        for text in (sample, sample + "\n", sample + "\n\n"):
            assert build(text, disk).origin == "compiled"
        assert build(sample, disk).origin == "compiled"
    (record,) = caplog.records
    assert str(empty) in record.getMessage() and "going on without" in record.getMessage()
    assert not list(empty.iterdir())
    for folder in (filled, filled / "locks", empty, public):
        folder.chmod(0o755)


def test_unreadable_file(
    sample: str, public: Path, caplog: pytest.LogCaptureFixture, unprivileged: Unprivileged
) -> None:
    disk = KernelCache(public / "kernels")
    build(sample, disk)
    caplog.clear()
    the_file(disk).chmod(0)
    with unprivileged():
        assert build(sample, disk).origin == "compiled"
    assert len(caplog.records) == 1


def test_folder_that_is_a_file(
    sample: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("")
    assert build(sample, KernelCache(tmp_path / "kernels")).origin == "compiled"
    assert len(caplog.records) == 1


def test_full_disk(
    sample: str,
    disk: KernelCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_room(path: Path, data: bytes) -> None:
        path.write_bytes(data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write_flushed", no_room)
        for text in (sample, sample + "\n"):
            assert build(text, disk).origin == "compiled"
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert not [p for p in disk.folder.iterdir() if p.is_file()]
    assert build(sample, disk).origin == "compiled" and build(sample, disk).origin == "disk"


def test_a_write_that_really_stops_half_way(sample: str, disk: KernelCache) -> None:
    """The kernel itself cuts the file (a size limit): nothing half-written is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        image = build(sample, disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert image.origin == "compiled" and len(image.data) > 1500
    assert not [p for p in disk.folder.iterdir() if p.is_file()]


WORKER = """
import os, sys
from pathlib import Path
from memra_lowlevel.compile import KernelCache, compile_source, nvrtc
nvrtc.library()
print("ready", flush=True)
text = sys.stdin.read()
image = compile_source(text, arch="sm_90", name_expressions=["scale<64, float>"],
                       cache=KernelCache(Path(sys.argv[1])))
print(image.origin, image.key, image.entries["scale<64, float>"], len(image.data))
"""


def test_six_processes_compile_once(sample: str, disk: KernelCache) -> None:
    many = sample + "".join(
        f"template __global__ void scale<{i}>(float*, const float*, int);\n" for i in range(1, 33)
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(disk.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    answers = []
    for worker in workers:  # all are loaded and waiting; closing their input lets them go
        assert worker.stdin is not None
        worker.stdin.write(many)
        worker.stdin.close()
    for worker in workers:
        assert worker.stdout is not None
        answers.append(worker.stdout.read().split())
        assert worker.wait(60) == 0
    assert sorted(a[0] for a in answers) == ["compiled", *["disk"] * 5]
    assert len({tuple(a[1:]) for a in answers}) == 1
    assert [e.problem for e in disk.entries(verify=True)] == [""]


def test_threads_compile_once(sample: str, disk: KernelCache) -> None:
    images: list[CompiledImage] = []
    start = threading.Barrier(6)

    def one() -> None:
        start.wait()
        images.append(compile_source(sample, arch="sm_90", cache=disk))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(i.origin for i in images) == ["compiled", *["memory"] * 5]


OWNER = """
import sys, time
from pathlib import Path
from memra_lowlevel.compile import KernelCache
disk = KernelCache(Path(sys.argv[1]))
def build():
    (disk.folder / ".source-sm_80-x.kernel.1.1.tmp").write_text("half")
    print("building", flush=True)
    time.sleep(60)
disk.get_or_build(sys.argv[2], "source", "sm_80", build)
"""


def test_killed_owner(sample: str, disk: KernelCache) -> None:
    key = build(sample, KernelCache(disk.folder / "elsewhere")).key
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(disk.folder), key], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "building\n"
    done: list[CompiledImage] = []
    waiter = threading.Thread(target=lambda: done.append(build(sample, disk)))
    waiter.start()
    time.sleep(0.3)
    assert not done, "the lock did not hold"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    waiter.join(20)
    assert done and done[0].origin == "compiled" and build(sample, disk).origin == "disk"
    assert len(list(disk.folder.glob(".*.tmp"))) == 1  # what the owner left; clearing takes it away
    assert disk.clear() == 1 and not [p for p in disk.folder.iterdir() if p.is_file()]


def test_living_owner_that_hangs(
    sample: str, disk: KernelCache, caplog: pytest.LogCaptureFixture
) -> None:
    from filelock import FileLock

    key = build(sample, KernelCache(disk.folder / "elsewhere")).key
    (disk.folder / "locks").mkdir()
    held = FileLock(str(disk.folder / "locks" / f"{key[:24]}.lock"))
    with held:
        impatient = KernelCache(disk.folder, lock_timeout_s=0.1)
        assert build(sample, impatient).origin == "compiled"
    (record,) = caplog.records
    assert "another process has held" in record.getMessage()
    assert build(sample, disk).origin == "disk"


def test_a_failed_build_frees_the_lock(disk: KernelCache, sample: str) -> None:
    for _ in range(2):
        with pytest.raises(compiler.CompileError):
            build("int x = ;", disk, name_expressions=[])
    assert disk.entries() == []


def test_clear_touches_only_its_own(sample: str, disk: KernelCache) -> None:
    build(sample, disk)
    build(sample + "\n", disk)
    (disk.folder / "notes.txt").write_text("mine")
    assert disk.clear() == 2
    assert [p.name for p in disk.folder.iterdir() if p.is_file()] == ["notes.txt"]
    assert KernelCache(disk.folder / "absent").clear() == 0
    assert KernelCache(disk.folder / "absent").entries() == []


def test_default_folder_follows_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path))
    assert cache.default_cache().folder == tmp_path / "kernels"
    assert cache.default_cache() is cache.default_cache()
    monkeypatch.delenv("MEMRA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_cache().folder == tmp_path / "xdg" / "memra_lowlevel" / "kernels"
