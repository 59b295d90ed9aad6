"""Prefixes on disk: one safetensors file with a version, the geometry and a digest per tensor.

A file holds all layers, on however many devices they lie, and does not say on which: a cache that
spreads them otherwise loads it, too.

==================  ================================================================
metadata            content
==================  ================================================================
``format``          ``memra-lowlevel prefix``
``version``         ``1``; another one is refused
``state``           JSON: ``pos``, ``mtp_len``, ``geometry``, and the numbers of each
                    latent layer
``digests``         JSON: BLAKE2b of every tensor's bytes, by name
``state_digest``    BLAKE2b of ``state`` and ``digests``
==================  ================================================================

Tensors are named ``latent.<layer>.rows|index_tail|index_pool_keys``, ``kv.<layer>.k|v`` and
``recur.<layer>.conv|ssm``.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RestoreRefused
from .kvdev import StreamKvDev
from .latent_snapshot import LatentPlaneSnapshot
from .prefix import CachePrefix, geometry, stream_for

if TYPE_CHECKING:
    from ..runtime import Buffer, Stream
    from .cache import Cache

__all__ = ["load", "save"]

FORMAT, VERSION = "memra-lowlevel prefix", "1"
_NUMBERS = (
    "width",
    "len",
    "index_width",
    "index_pool",
    "index_pools_ready",
    "format",
)
_PARTS = ("rows", "index_tail", "index_pool_keys")

Array = np.ndarray[Any, Any]


def save(prefix: CachePrefix, stream: Stream, path: str | os.PathLike[str]) -> Path:
    """Write a prefix; the file appears whole or not at all. Waits for the stream.

    Parameters
    ----------
    prefix : CachePrefix
    stream : Stream
        Behind which the copies on its device are there. Copies on other devices follow the
        streams that they were made on, which must still be open.
    path : path-like
    """
    from safetensors.numpy import save_file

    tensors: dict[str, Array] = {}
    latent: dict[str, dict[str, Any]] = {}
    for il, snap in prefix.latent.items():
        latent[str(il)] = {name: getattr(snap, name) for name in _NUMBERS}
        for part in _PARTS:
            buffer: Buffer | None = getattr(snap, part)
            if buffer is not None:
                tensors[f"latent.{il}.{part}"] = buffer.to_numpy(prefix.stream_of(buffer, stream))
    for kind, names, pairs in (
        ("kv", ("k", "v"), prefix.kv),
        ("recur", ("conv", "ssm"), prefix.recur),
    ):
        for il, pair in pairs.items():
            for name, buffer in zip(names, pair, strict=True):
                tensors[f"{kind}.{il}.{name}"] = buffer.to_numpy(prefix.stream_of(buffer, stream))
    state = json.dumps(
        {
            "pos": prefix.pos,
            "mtp_len": prefix.mtp_len,
            "geometry": prefix.geometry,
            "latent": latent,
        },
        sort_keys=True,
    )
    digests = json.dumps({name: _digest(a) for name, a in tensors.items()}, sort_keys=True)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "state": state,
        "digests": digests,
        "state_digest": _text_digest(state, digests),
    }
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def load(path: str | os.PathLike[str], cache: Cache, stream: Stream) -> CachePrefix:
    """Read a prefix for a cache; the cache itself is not touched.

    Everything is checked on the host before anything goes to a device.

    Raises
    ------
    RestoreRefused
        The file is missing, damaged, of another version or kind, or of another model.
    """
    tensors, state = _read(Path(path))
    if state["geometry"] != json.loads(json.dumps(geometry(cache))):
        raise RestoreRefused(
            f"{path}: the prefix is of a model with layers {state['geometry']}, the cache has "
            f"{geometry(cache)}. Nothing was copied"
        )
    prefix = CachePrefix(int(state["pos"]), int(state["mtp_len"]), geometry(cache))
    try:
        for group in cache._groups():
            dev = StreamKvDev(group.device, stream_for(group, stream, prefix))

            def up(name: str, dev: StreamKvDev = dev) -> Buffer | None:
                found = tensors.get(name)
                return None if found is None else dev.device.from_numpy(found, dev.stream)

            for il in group.latent:
                numbers = state["latent"].get(str(il))
                rows = up(f"latent.{il}.rows")
                if numbers is not None and rows is not None:
                    tail, keys = (up(f"latent.{il}.{part}") for part in _PARTS[1:])
                    prefix.latent[il] = LatentPlaneSnapshot(
                        rows, index_tail=tail, index_pool_keys=keys, **numbers
                    )
            for il in group.kv:
                k, v = up(f"kv.{il}.k"), up(f"kv.{il}.v")
                if k is not None and v is not None:
                    prefix.kv[il] = k, v
            for il in group.recur:
                conv, ssm = up(f"recur.{il}.conv"), up(f"recur.{il}.ssm")
                if conv is not None and ssm is not None:
                    prefix.recur[il] = conv, ssm
    except BaseException:
        prefix.close()
        raise
    return prefix


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    def refuse(why: str) -> RestoreRefused:
        return RestoreRefused(f"{path}: {why}. Nothing was copied; prime the prompt again")

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise refuse(f"the file is no prefix but {metadata.get('format')!r}")
            if metadata.get("version") != VERSION:
                raise refuse(f"version {metadata.get('version')!r}, this library reads {VERSION}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise refuse(f"it cannot be read ({error})") from error
    state, digests = metadata.get("state", ""), metadata.get("digests", "")
    if metadata.get("state_digest") != _text_digest(state, digests):
        raise refuse("its description is damaged")
    wanted: dict[str, str] = json.loads(digests)
    if set(wanted) != set(tensors):
        raise refuse(f"tensors {sorted(set(wanted) ^ set(tensors))} are missing or strange")
    for name, array in tensors.items():
        if wanted[name] != _digest(array):
            raise refuse(f"tensor {name} is damaged")
    described: dict[str, Any] = json.loads(state)
    return tensors, described


def _digest(array: Array) -> str:
    made = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes())
    return made.hexdigest()


def _text_digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
