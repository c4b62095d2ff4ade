"""A hub on this machine: serves folders as repositories over HTTP, as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

__all__ = ["HubServer", "hub_server"]

GIVE_UP_S = 60.0
DRIP_S = 0.02
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Repositories by id, each a folder, with one commit. `downloads` lists the files that were fetched whole
    or in part, as (path in the repository, number of bytes). `on_download` is called with a file's path,
    before it is sent."""

    def __init__(self) -> None:
        self.on_download: Callable[[str], object] = lambda name: None
        self.folders: dict[str, Path] = {}
        self.others: dict[str, Path] = {}
        self.downloads: list[tuple[str, int]] = []
        self.endpoint = ""
        self.headers: dict[str, str | None] = {}
        self.pace: Callable[[str], str | None] = lambda name: None
        self.is_slow, self.released = threading.Event(), threading.Event()
        self.has_given_up = False

    def names(self) -> list[str]:
        """The files that were fetched, each once, in order of their names."""
        return sorted({name for name, _ in self.downloads})


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """Run a hub that huggingface_hub uses in place of the real one, with `cache` as its local cache."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.endpoint = endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def handler_of(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # the reader has closed it
                super().handle()

        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if found := re.fullmatch(r"/api/models/(.+?)(/revision/[^/]+)?", path):
                folder = hub.folders.get(found[1])
                if folder is not None and "/tree/" not in path:
                    others = [{"rfilename": name, "size": 1} for name in hub.others]
                    listed = siblings(folder) + others
                    return self.send_json({"id": found[1], "sha": COMMIT, "siblings": listed})

            if found := re.fullmatch(r"/api/models/(.+?)/tree/[^/]+", path):
                return self.send_json([entry | {"type": "file"} for entry in tree(hub.folders[found[1]])])

            found = re.fullmatch(r"/(.+?)/resolve/[^/]+/(.+)", path)
            folder = hub.folders.get(found[1]) if found is not None else None
            if found is not None and found[2] in hub.others:
                return self.send_file(hub.others[found[2]], found[2], has_body=has_body)

            if found is None or folder is None or not (folder / found[2]).is_file():
                return self.send(
                    404, b"", {"X-Error-Code": "RepoNotFound" if folder is None else "EntryNotFound"}
                )

            self.send_file(folder / found[2], found[2], has_body=has_body)

        def send_file(self, file: Path, name: str, *, has_body: bool) -> None:
            data = file.read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(data)}"', "Accept-Ranges": "bytes"}
            status = 200
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted is not None and data and "Accept-Ranges" not in hub.headers:
                start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                data, status = data[start : end + 1], 206
            if has_body:
                hub.downloads.append((name, len(data)))
                hub.on_download(name)
            self.send(status, data, headers, has_body=has_body, name=name)

        def send_json(self, value: Any) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, name="listing")

        def send(
            self, status: int, data: bytes, headers: dict[str, str], *, has_body: bool = True, name: str = ""
        ) -> None:
            pace = hub.pace(name) if has_body else None
            if pace == "stall":
                hub.is_slow.set()
                hub.has_given_up |= not hub.released.wait(GIVE_UP_S)
            self.send_response(status)
            headers["Content-Length"] = str(len(data))
            for header, value in (headers | (hub.headers if name != "listing" else {})).items():
                if value is not None:
                    self.send_header(header, value)
            if "Content-Length" in hub.headers:
                self.send_header("Connection", "close")
            self.end_headers()
            if has_body:
                self.write(data, pace)

        def write(self, data: bytes, pace: str | None) -> None:
            if pace == "halt":
                self.wfile.write(data[: len(data) // 2])
                data = data[len(data) // 2 :]
                hub.has_given_up |= not hub.released.wait(GIVE_UP_S)
            given_up_at = time.monotonic() + GIVE_UP_S
            while data and pace == "drip" and not hub.released.wait(DRIP_S):
                hub.is_slow.set()
                self.wfile.write(data[:1])
                data = data[1:]
                if time.monotonic() > given_up_at:
                    hub.has_given_up = True
                    break
            self.wfile.write(data)

    return Handler


def tree(folder: Path) -> list[dict[str, Any]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [
        {"path": f.relative_to(folder).as_posix(), "size": f.stat().st_size, "oid": oid(f.read_bytes())}
        for f in files
    ]


def siblings(folder: Path) -> list[dict[str, Any]]:
    return [{"rfilename": entry["path"], "size": entry["size"]} for entry in tree(folder)]


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
