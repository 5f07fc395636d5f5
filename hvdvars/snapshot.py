"""The checkpoint file: a `.npz` of numpy, whole or absent. Local; no TensorFlow state, no communication.

Members, each a `.npy` inside an uncompressed zip archive with a checksum per member:

* `meta`: a JSON text. `format` is `hvdvars` and `version` 1; `variables` lists `name`, `shape` and `dtype` of each
  variable; `optimizer` is null or holds `class`, `slots` (names) and `scalars` (names); `dtypes` names the dtype of
  members that numpy knows by their bits only (bfloat16 as uint16); `extra` is the caller's; `mode` and
  `ranks` tell who wrote it.
* `variable/<i>`: the value of variable i.
* `slot/<name>/<i>`: the optimizer's slot of that name for variable i, with the variable's full shape.
* `scalar/<name>`: what the optimizer keeps once: `iterations`, `learning_rate`, …
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

FORMAT = "hvdvars"
VERSION = 1


def file_path(path: str | os.PathLike[str]) -> Path:
    """The file meant by `path`: with `.npz` added where the last part has no suffix. Local."""
    given = Path(path)
    return given if given.suffix else given.with_name(f"{given.name}.npz")


def write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the file under another name in the same folder (made if needed), then move it into place. Local.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
        TypeError: an array holds strings or objects.
    """
    target = Path(os.path.realpath(path))
    members, dtypes = {}, {}
    for key, array in arrays.items():
        members[key], dtype = _as_plain(key, array)
        if dtype is not None:
            dtypes[key] = dtype
    text = json.dumps({"format": FORMAT, "version": VERSION, **meta, "dtypes": dtypes})
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, meta=np.array(text), **members)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The file's `meta` and its other members, all of them read and checked. Local.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it is damaged, was not written by `write`, or by a newer version.
    """
    try:
        with open(path, "rb") as file:
            meta, arrays = _load(file, path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path} on rank 0, which reads for all") from None
    except _ForeignError:
        raise
    except Exception as problem:  # zipfile, zlib, numpy and json each have their own
        # A damaged archive may point before its beginning, which the system calls an invalid argument.
        if isinstance(problem, OSError) and problem.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is damaged or no checkpoint: {type(problem).__name__}: {problem}") from problem
    return meta, arrays


class _ForeignError(ValueError):
    """A sound file, but none for us."""


def _load(file: Any, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(file, allow_pickle=False) as members:
        if not hasattr(members, "files") or "meta" not in members.files:
            raise _ForeignError(f"{path} has no 'meta': hvdvars.checkpoint did not write it")
        meta = json.loads(str(members["meta"]))
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise _ForeignError(f"{path} is not in the format of hvdvars.checkpoint")
        if meta["version"] > VERSION:
            raise _ForeignError(f"{path} has version {meta['version']}; this hvdvars reads up to {VERSION}. Update it.")
        arrays = {key: members[key] for key in members.files if key != "meta"}
    for key, dtype in meta["dtypes"].items():
        arrays[key] = arrays[key].view(tf.as_dtype(dtype).as_numpy_dtype)
    _check_members(meta, arrays)
    return meta, arrays


def _check_members(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    for index, variable in enumerate(meta["variables"]):
        found = arrays[f"variable/{index}"]
        if (list(found.shape), found.dtype.name) != (variable["shape"], variable["dtype"]):
            raise ValueError(f"variable/{index} has shape {found.shape} and dtype {found.dtype}, not {variable}")
    for name in (meta["optimizer"] or {"scalars": []})["scalars"]:
        arrays[f"scalar/{name}"]  # noqa: B018 - a KeyError if it is missing


def _as_plain(key: str, array: np.ndarray) -> tuple[np.ndarray, str | None]:
    """The array as numpy alone can read it, and the name of its dtype where that is not the array's."""
    if array.dtype.kind in "OSU":
        raise TypeError(f"{key} has dtype {array.dtype}, which is no number; it cannot be saved")
    if array.dtype.isbuiltin == 1:
        return array, None
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    return array.view(bits), array.dtype.name


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a power cut; some file systems cannot, and the file is whole all the same."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
