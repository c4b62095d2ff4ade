"""Download of files of a repository on the hub into its cache."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # not marked as public

from drift_sdk._files import is_inside
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.hub_progress import DownloadCounter
from drift_sdk.loading.hub_threads import call_each

__all__ = ["download"]

COMMIT = re.compile("[0-9a-f]{40}")
NAMING_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
"""Headers of the hub from which its library makes paths in the cache, without a check."""
LAST_FILE = "tokenizer.json"
"""Fetched last: a look-up in the cache takes it as a sign that the other files are there."""


def download(
    repo_id: str,
    names: Collection[str],
    counter: DownloadCounter,
    *,
    revision: str | None,
    cache_dir: str | Path | None,
) -> Path:
    """Fetch files of one commit that are not in the cache; returns the repository's folder there.

    names:    their paths in the repository, one at least.
    revision: of the first file. The others are of the same commit, whatever the revision names later.

    Raises what the counter's report and the hub's library raise. Like the library's own function, but that
    downloads in a pool of threads, which the interpreter's exit waits for.
    """
    options: dict[str, Any] = {"cache_dir": cache_dir}
    if "tqdm_class" in inspect.signature(huggingface_hub.hf_hub_download).parameters:
        options["tqdm_class"] = counter.bar_class()

    def fetch(revision: str | None, name: str) -> Path:
        check_responses()
        path = huggingface_hub.hf_hub_download(repo_id, name, revision=revision, **options)
        counter.file_done(name)
        return Path(path).parents[len(PurePosixPath(name).parts) - 1]

    first, *others = sorted(names, key=lambda name: (name == LAST_FILE, name))
    last = [others.pop()] if others and others[-1] == LAST_FILE else []
    groups = [[first], others, last]
    if revision is not None and COMMIT.fullmatch(revision):
        groups = [[first, *others], last]
    try:
        folders: set[Path] = set()
        for group in groups:
            folders.update(call_each(partial(fetch, revision), group, counter.report))
            if len(folders) > 1:
                raise ModelLoadError("the hub sends files of several commits")

            (folder,) = folders
            revision = folder.name
    finally:
        counter.stopped.set()
    counter.report()
    return folder


def check_responses() -> None:
    """Have the library's session, on this thread, raise ModelLoadError for headers that name a path outside
    of the cache: the library would write there."""
    session: Any = get_session()
    hooks = session.event_hooks if hasattr(session, "event_hooks") else session.hooks  # httpx, requests
    if check_names not in hooks["response"]:
        hooks["response"].append(check_names)


def check_names(response: Any, *_: object, **__: object) -> None:
    """Raise ModelLoadError for a response that names a path outside of the cache."""
    for header in NAMING_HEADERS:
        value = response.headers.get(header)
        # The library takes all leading W and / from a tag, and older versions none.
        names = (value.lstrip("W/").strip('"'), value.strip('"')) if value else ()
        if not all(map(is_inside, names)):
            raise ModelLoadError(
                f"the hub sends {header} {short_repr(value)}, expected the name of a file in the cache"
            )
