"""Kernels compiled ahead of time: a folder or zip of code, used in place of NVRTC.

``build`` writes a store, ``use`` (or the variable ``MEMRA_CUBINS``) opens one for the process. Code
is taken from a store only for a source of the same content, the same options and at least the
name expressions asked for, so a stale store is ignored, never believed. With a store that covers
the device, neither NVRTC nor its bindings are loaded.

A store holds ``manifest.json`` and one file per image in the format of :mod:`.cache`::

    {"format": 1, "compiler": "NVRTC 12.9", "images": [
      {"file": "kv.append-sm_90-3f….kernel", "source": "kv/append.cu", "arch": "sm_90",
       "closure": "<digest>", "flags": [...], "names": [...], "checksum": "<blake2b>"}, …]}
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ArchUnsupported, CompileError
from . import arch as archs
from . import cache, compiler, nvrtc
from . import source as sources
from .image import CompiledImage
from .options import define_flags

__all__ = ["VARIABLE", "CubinStore", "Record", "build", "use"]

log = logging.getLogger(__name__)

VARIABLE = "MEMRA_CUBINS"
"""Environment variable with the path of a store that every process opens by itself."""

_FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Record:
    """One image of a store, as its manifest describes it."""

    file: str
    source: str
    arch: str
    closure: str
    flags: tuple[str, ...]
    names: tuple[str, ...]
    checksum: str


class CubinStore:
    """A folder or zip file of compiled kernels.

    Parameters
    ----------
    path : path

    Raises
    ------
    CompileError
        When there is no readable manifest of this format.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._images: dict[str, CompiledImage | None] = {}
        try:
            manifest = json.loads(self._read(_MANIFEST))
            if manifest["format"] != _FORMAT:
                raise ValueError(f"format {manifest['format']!r}, this version reads {_FORMAT}")
            self.compiler = str(manifest["compiler"])
            self.records = tuple(
                Record(
                    str(r["file"]),
                    str(r["source"]),
                    str(r["arch"]),
                    str(r["closure"]),
                    tuple(r["flags"]),
                    tuple(r["names"]),
                    str(r["checksum"]),
                )
                for r in manifest["images"]
            )
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise CompileError(
                f"{self.path} is no store of compiled kernels ({error}); "
                "build one with tools/build_cubins.py"
            ) from error

    def archs(self) -> tuple[str, ...]:
        """Architectures that the store has code for, sorted."""
        return tuple(sorted({r.arch for r in self.records}))

    def find(
        self, closure: sources.Closure, arch: str, flags: Sequence[str], names: Sequence[str]
    ) -> CompiledImage | None:
        """Return the code for a source on an architecture; None when the store has none.

        The ladder is the compiler's: exact, an older member of the family, PTX.
        """
        # Of several that have the names, the smallest is loaded.
        fitting = {
            r.arch: r
            for r in sorted(self.records, key=lambda r: -len(r.names))
            if r.closure == closure.digest
            and r.flags == tuple(flags)
            and set(names) <= set(r.names)
        }
        chosen = _choose(arch, tuple(fitting))
        if chosen is None:
            return None
        image = self._load(fitting[chosen.arch])
        return image and replace(image, want=arch, rung=chosen.rung, origin="store")

    def use(self) -> CubinStore:
        """Ask this store first from now on, in this process."""
        if self.find not in compiler.stores:
            compiler.stores.insert(0, self.find)
        return self

    def close(self) -> None:
        """Stop asking this store. Idempotent."""
        if self.find in compiler.stores:
            compiler.stores.remove(self.find)

    def verify(self) -> list[tuple[str, str]]:
        """Re-hash every file; (file, problem) of those that are not what was built."""
        problems = []
        for record in self.records:
            try:
                self._checked(record)
            except (OSError, KeyError, cache.Damage) as error:
                problems.append((record.file, str(error)))
        return problems

    def _load(self, record: Record) -> CompiledImage | None:
        if record.file not in self._images:
            try:
                self._images[record.file] = self._checked(record)
            except (OSError, KeyError, cache.Damage) as error:
                log.warning("%s in %s cannot be used: %s", record.file, self.path, error)
                self._images[record.file] = None
        return self._images[record.file]

    def _checked(self, record: Record) -> CompiledImage:
        data = self._read(record.file)
        if _hash(data) != record.checksum:
            raise cache.Damage("its checksum differs from the manifest")
        return cache.decode(data)

    def _read(self, name: str) -> bytes:
        if self.path.is_dir():
            return (self.path / name).read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def __repr__(self) -> str:
        return f"<CubinStore {self.path}, {len(self.records)} images for {', '.join(self.archs())}>"


def use(path: str | Path) -> CubinStore:
    """Open a store and ask it first from now on; ``close`` it to stop."""
    return CubinStore(path).use()


def build(
    path: str | Path,
    jobs: Iterable[compiler.Job],
    *,
    workers: int | None = None,
) -> CubinStore:
    """Compile jobs into a store.

    Parameters
    ----------
    path : path
        A folder, or a file ending in ``.zip``. Written anew; replaced as a whole where it is a zip.
    jobs : iterable of Job
        Each with a GPU architecture.

    Raises
    ------
    CompileError
        Of the first job that does not compile; nothing is written.
    ArchUnsupported
        For ``host``: its code depends on the machine it is built on.
    """
    wanted = list(jobs)
    if any(job.arch == archs.HOST for job in wanted):
        raise ArchUnsupported("a store holds GPU code; the host device builds its own", want="host")
    files: dict[str, bytes] = {}
    images = []
    for job, image in zip(wanted, compiler.compile_many(wanted, workers=workers), strict=True):
        if isinstance(image, CompileError):
            raise image
        closure = sources.read(job.source, name=job.name, include_dirs=job.include_dirs)
        name = f"{compiler.label(closure.name)}-{image.arch}-{image.key[:24]}.kernel"
        files[name] = cache.encode(image)
        images.append(
            {
                "file": name,
                "source": closure.name,
                "arch": image.arch,
                "closure": closure.digest,
                "flags": [*job.options.nvrtc_flags(), *define_flags(job.defines)],
                "names": sorted(image.entries),
                "checksum": _hash(files[name]),
            }
        )
    manifest = {"format": _FORMAT, "compiler": nvrtc.library().name, "images": images}
    files[_MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    _write(Path(path), files)
    return CubinStore(path)


@functools.cache
def open_named(path: str) -> CubinStore | None:
    """Open the store that ``MEMRA_CUBINS`` names, once; a bad one is one log line."""
    try:
        return CubinStore(path).use()
    except CompileError as error:
        log.warning("%s: %s", VARIABLE, error)
        return None


def _choose(want: str, have: Sequence[str]) -> archs.Target | None:
    """Walk the ladder over the architectures that are there."""
    if want in have:
        kind = "ptx" if want.startswith("compute_") else "cubin"
        return archs.Target(want, want, "exact" if kind == "cubin" else "ptx", kind)
    parsed = archs.parse(want)
    if parsed.suffix or parsed.kind != "sm":
        return None
    known = [archs.parse(name) for name in have]
    family = [
        a
        for a in known
        if a.kind == "sm"
        and a.suffix in ("", "f")
        and a.number <= parsed.number
        and a.number in archs.relatives(parsed.number)
    ]
    if family:
        best = max(family, key=lambda a: (a.number, a.suffix))
        return archs.Target(want, str(best), "family", "cubin", "from a store")
    portable = [
        a for a in known if a.kind == "compute" and not a.suffix and a.number <= parsed.number
    ]
    if portable:
        best = max(portable, key=lambda a: a.number)
        return archs.Target(want, str(best), "ptx", "ptx", "from a store")
    return None


def _write(path: Path, files: dict[str, bytes]) -> None:
    if path.suffix == ".zip":
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                # A fixed time stamp: the same kernels give the same archive.
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        os.replace(scratch, path)
        return
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("*.kernel"):
        if old.name not in files:
            old.unlink()
    for name in sorted(files, key=lambda n: n == _MANIFEST):  # the manifest last
        scratch = path / f".{name}.{os.getpid()}.tmp"
        scratch.write_bytes(files[name])
        os.replace(scratch, path / name)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()
