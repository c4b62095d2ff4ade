"""What the endpoints of an application share: engines by name, access, limits of bodies."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Collection, Mapping
from typing import TypeVar

import anyio
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from drift_sdk import BaseEngine, ConfigError, RequestError, SamplingParams
from drift_sdk.openai.wire import Body, Unauthorised, UnknownModel, decode

BodyT = TypeVar("BodyT", bound=Body)
CLOSE = {"Connection": "close"}
BODY_TIMEOUT_S = 60.0
"""Most seconds until a body has arrived; a slower one gets a 408."""
DIGEST_CHARS = 32


class Model(Struct, frozen=True, eq=False):
    """An engine under the name by which clients know it."""

    name: str
    engine: BaseEngine


class Keys:
    """The keys of which a request needs one. Without keys, every request is let in."""

    def __init__(self, keys: Collection[str]) -> None:
        if isinstance(keys, str):
            raise ConfigError.of("api_keys", "a string", "a collection of strings")

        for key in keys:
            if not isinstance(key, str) or not key.isascii() or not key.strip() or key != key.strip():
                raise ConfigError(
                    "api_keys: expected texts of ASCII characters that do not begin or end with a blank",
                    field="api_keys",
                )

        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._secret = secrets.token_bytes(32)

    def check(self, request: Request) -> str | None:
        """Text that stands for the key of a request, the same for the same key; None without keys.
        Unauthorised without one of the keys."""
        if not self._digests:
            return None

        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode(errors="replace")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._digests]  # all: time tells nothing
        if not any(matches):
            what = "wrong" if given else "missing"
            raise Unauthorised(f"{what} API key: expected one as a Bearer token, or in x-api-key")

        return hmac.new(self._secret, digest, hashlib.sha256).hexdigest()[:DIGEST_CHARS]


class Service:
    """Engines and options of one application.

    models:              engines by name; several names may have one engine.
    keys:                whom it lets in.
    salts_keys:          requests of different keys share no cached prefixes.
    shows_cached_tokens: answers say how many tokens of the prompt were cached.
    max_body_bytes:      of the largest body that is read.
    """

    def __init__(
        self,
        engines: Mapping[str, BaseEngine],
        keys: Keys,
        *,
        salts_keys: bool,
        shows_cached_tokens: bool,
        max_body_bytes: int,
    ) -> None:
        self.models = {name: Model(name, engine) for name, engine in engines.items()}
        self.engines = list({id(engine): engine for engine in engines.values()}.values())
        self.created = int(time.time())
        self.shows_cached_tokens = shows_cached_tokens
        self._keys = keys
        self._salts_keys = salts_keys
        self._max_body_bytes = max_body_bytes

    def admit(self, request: Request) -> None:
        """Unauthorised for a request without one of the keys."""
        request.state.key = self._keys.check(request)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body of a request. HTTPException if it is too large or does not arrive, RequestError if it is
        not of this kind."""
        limit = self._max_body_bytes
        too_large = HTTPException(413, f"the body is larger than {limit} bytes", CLOSE)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large

        data = bytearray()
        try:
            with anyio.fail_after(BODY_TIMEOUT_S):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError as error:
            raise HTTPException(408, f"the body took over {BODY_TIMEOUT_S} s to arrive", CLOSE) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the client left before the body had arrived", CLOSE) from error

        return decode(bytes(data), kind)

    def model(self, name: str | None) -> Model:
        """The model of a request. UnknownModel for one that is not served; RequestError if there are several
        and the request names none."""
        if name is None:
            if len(self.engines) == 1:
                return next(iter(self.models.values()))

            raise RequestError.of("model", None, f"one of {self.names}")

        found = self.models.get(name)
        if found is None:
            raise UnknownModel(f"model {name[:200]!r}: this server has {self.names}")

        return found

    @property
    def names(self) -> str:
        return ", ".join(map(repr, self.models))

    def salted(self, request: Request, params: SamplingParams) -> SamplingParams:
        """The parameters with the salt of the request's key."""
        salt = self.salt(request, params.cache_salt)
        return params if salt == params.cache_salt else params.replace(cache_salt=salt)

    def salt(self, request: Request, own: str | None) -> str | None:
        """The salt of a request, which has `own`, with the salt of its key."""
        key = request.state.key
        if key is None or not self._salts_keys:
            return own

        # The salt of the request may be as long as salts can be.
        digest = hashlib.sha256((own or "").encode(errors="replace")).hexdigest()
        return f"{key}-{digest[:DIGEST_CHARS]}"


def new_id(prefix: str, given: str | None = None) -> str:
    """An id of an answer, and of its request in the engine."""
    return f"{prefix}{given or uuid.uuid4().hex}"
