r"""The disk cache of compiled kernels.

One file per result, ``<kernel>-<arch>-<key>.kernel``::

    memra-kernel 1 <checksum of the rest>\n
    <one line of JSON: entries, signatures, layouts, resources, log, full key>\n
    <the cubin or PTX>

``head -2`` reads it. A file appears whole or not at all: it is written under another name, flushed
to the disk, and renamed. Each key has a lock that the operating system frees when its owner dies,
and whoever waited for it looks again before compiling. A cache that cannot be used (read-only,
full, damaged) costs time and one log line, never a result.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..paths import cache_root
from .image import CompiledImage

__all__ = ["FORMAT_VERSION", "Damage", "Entry", "KernelCache", "default_cache"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Version of the file format and of the meaning of its fields; part of every key."""

_MAGIC = b"memra-kernel"
_SUFFIX = ".kernel"
_LOCK_TIMEOUT_S = 300.0


class Damage(Exception):
    """A cache file is not what was written; the text says how."""


@dataclass(frozen=True)
class Entry:
    """One file of the cache.

    Attributes
    ----------
    path : Path
    n_bytes : int
    problem : str
        Empty for a sound file.
    """

    path: Path
    n_bytes: int
    problem: str = ""


class KernelCache:
    """Compiled kernels in a folder.

    Safe under any number of threads and processes that share the folder.

    Parameters
    ----------
    folder : path
        Created when something is first stored.
    lock_timeout_s : float
        How long to wait for a living owner before compiling without the lock.
    """

    def __init__(self, folder: str | Path, *, lock_timeout_s: float = _LOCK_TIMEOUT_S):
        self.folder = Path(folder)
        self.lock_timeout_s = lock_timeout_s
        self._told: set[str] = set()

    def path_of(self, key: str, label: str, arch: str) -> Path:
        """File of a key."""
        return self.folder / f"{label}-{arch}-{key[:24]}{_SUFFIX}"

    def get(self, key: str, label: str, arch: str, *, quiet: bool = False) -> CompiledImage | None:
        """Read an entry; None when it is absent, damaged or unreadable.

        Damage gives one log line that names the file, unless ``quiet``.
        """
        path = self.path_of(key, label, arch)
        try:
            image = decode(path.read_bytes())
            if image.key != key:
                raise Damage("it holds another key")
            return image
        except FileNotFoundError:
            return None
        except Damage as damage:
            if not quiet:
                log.warning("damaged cache file %s (%s): compiling again", path, damage)
        except OSError as error:
            self._tell("read", error)
        return None

    def put(self, image: CompiledImage, label: str) -> bool:
        """Publish an entry in one step; False (and a log line) when the folder cannot take it."""
        path = self.path_of(image.key, label, image.arch)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                _write_flushed(scratch, encode(image))
                os.replace(scratch, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    scratch.unlink()
                raise
        except OSError as error:
            self._tell("written", error)
            return False
        return True

    def get_or_build(
        self, key: str, label: str, arch: str, build: Callable[[], CompiledImage]
    ) -> CompiledImage:
        """Read an entry, or build and publish it while others wait."""
        image = self.get(key, label, arch)
        if image is not None:
            return image
        with self._lock(key) as waited:
            if waited:
                image = self.get(key, label, arch, quiet=True)
                if image is not None:
                    return image
            image = build()
            self.put(image, label)
            return image

    def entries(self, *, verify: bool = False) -> list[Entry]:
        """List the files; ``verify`` re-hashes each and parses its header."""
        found = []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            problem, size = "", 0
            try:
                size = path.stat().st_size
                if verify:
                    image = decode(path.read_bytes())
                    if not path.name.endswith(f"-{image.arch}-{image.key[:24]}{_SUFFIX}"):
                        problem = "its name does not fit its key"
            except (OSError, Damage) as error:
                problem = str(error)
            found.append(Entry(path, size, problem))
        return found

    def clear(self) -> int:
        """Delete every entry, scratch file and lock of the folder; the number of entries deleted.

        Only files that the cache itself names are touched.
        """
        n = 0
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{_SUFFIX}.*.tmp")]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                n += path.suffix == _SUFFIX
        for path in (self.folder / "locks").glob("*.lock"):
            with contextlib.suppress(OSError):
                path.unlink()
        return n

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Hold the key's lock; yields whether an entry may have appeared since the last look."""
        from filelock import FileLock, Timeout

        lock = None
        try:
            folder = self.folder / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(folder / f"{key[:24]}.lock"), timeout=self.lock_timeout_s)
            lock.acquire()
        except Timeout:
            log.warning(
                "another process has held %s for %.0f s: compiling without it",
                self.folder / "locks" / f"{key[:24]}.lock",
                self.lock_timeout_s,
            )
            lock = None
        except (OSError, NotImplementedError) as error:
            self._tell("locked", error)
            lock = None
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _tell(self, what: str, error: Exception) -> None:
        """One log line per kind of trouble and cache, not one per kernel."""
        reason = (
            os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        )
        group = "full" if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) else "access"
        if group not in self._told:
            self._told.add(group)
            log.warning(
                "the kernel cache %s cannot be %s (%s): going on without it",
                self.folder,
                what,
                reason,
            )


_caches: dict[Path, KernelCache] = {}


def default_cache() -> KernelCache:
    """Return the cache in the user's cache folder (``MEMRA_CACHE_DIR`` moves it)."""
    folder = cache_root() / "kernels"
    return _caches.setdefault(folder, KernelCache(folder))


def encode(image: CompiledImage) -> bytes:
    """Bytes of a cache file."""
    body = json.dumps(image.header(), separators=(",", ":")).encode() + b"\n" + image.data
    return b"%s %d %s\n" % (_MAGIC, FORMAT_VERSION, _checksum(body)) + body


def decode(data: bytes) -> CompiledImage:
    """Reverse :func:`encode`; raises :class:`Damage`."""
    first, _, body = data.partition(b"\n")
    parts = first.split(b" ")
    if len(parts) != 3 or parts[0] != _MAGIC:
        raise Damage("it does not begin like a cache file")
    if parts[1] != b"%d" % FORMAT_VERSION:
        raise Damage(f"format version {parts[1].decode('ascii', 'replace')}")
    if parts[2] != _checksum(body):
        raise Damage(f"its checksum does not fit its {len(data)} bytes")
    head, _, payload = body.partition(b"\n")
    try:
        return CompiledImage.from_header(json.loads(head), payload, "disk")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damage(f"its header cannot be read: {error!r}") from error


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=20).hexdigest().encode()


def _write_flushed(path: Path, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
