"""Checks that a path is a regular file, to be made before opening it, and that a name leads to no place
outside a folder.

Opening a FIFO blocks its reader, and reading a device may never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from drift_sdk.errors import ModelLoadError

__all__ = ["has_file", "is_inside", "unreadable"]

SPECIAL_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def has_file(path: Path) -> bool:
    """Whether a regular file, or a symbolic link to one, exists at `path`.

    False if nothing exists there. Raises ModelLoadError naming the path if something else does: a directory,
    a special file, a symbolic link to a missing file, or a path that cannot be examined.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return False

        raise ModelLoadError(f"{path}: a symbolic link to a file that is missing") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error

    if not stat.S_ISREG(mode):
        kind = SPECIAL_KINDS.get(stat.S_IFMT(mode), "a special file")
        raise ModelLoadError(f"{path}: is {kind}, expected a regular file")

    return True


def is_inside(name: str) -> bool:
    """Whether `name` is a path below the folder that it is joined to, on any system. The file there may be a
    symbolic link.

    To be asked of each name that files or a hub give, before it becomes a path.
    """
    if "\0" in name:
        return False

    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False

    if ".." in name.replace("\\", "/").split("/"):
        return False

    path = PurePosixPath(name)
    return bool(path.parts) and not path.anchor and not any(PureWindowsPath(p).anchor for p in path.parts)


def unreadable(path: Path, error: OSError) -> ModelLoadError:
    """The error for a file that cannot be opened or read, such as one without permission."""
    return ModelLoadError(f"{path}: cannot be read: {error.strerror or error}")
