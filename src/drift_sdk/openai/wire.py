"""JSON bodies of requests as typed values, and errors as the protocols' own error objects.

A field of a body is one of these:

- supported: a field of the body's Struct, or one of `sampling.SAMPLING`;
- without effect on the answer, and ignored: in `ignored`;
- refused by an error that names it, unless it has a value that changes nothing: in `refused`;
- unknown, and refused too: it may be the wrong spelling of one that matters.

null means the default, since clients send null for unset fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import DriftError, EngineClosed, PromptTooLong, QueueFull, RequestError
from drift_sdk._fields import nearest_name

MAX_NAME_CHARS = 100
MISSING = re.compile("Object missing required field `(.*)`")
PATH_PART = re.compile(r"\.(\w+)|\[[^]]*\]")
"""A part of the path of a value: a field, or a place in a list, which has no name."""


class Wire(Struct):
    """An object inside a body. Its unknown fields are ignored: clients send back what other servers added."""


class Strict(Struct, forbid_unknown_fields=True):
    """An object whose fields all have an effect, so that an unknown one is refused."""


class Body(Struct, kw_only=True):
    """The body of a request.

    sampling: fields of `sampling.SAMPLING` that were given, by their names in the protocol.
    """

    max_items: ClassVar[int] = 100_000
    """Most items over all levels: as many as engines take in messages and tools."""
    sampling_names: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    sampling: dict[str, Any] = {}


BodyT = TypeVar("BodyT", bound=Body)


def decode(data: bytes, kind: type[BodyT]) -> BodyT:
    """The body that JSON text describes. RequestError for anything else, with the path of the wrong value."""
    try:
        values = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and the one of text that is no UTF-8
        raise RequestError(f"body: JSON decode error: {error}", field="body") from error

    if not isinstance(values, dict):
        raise RequestError.of("body", values, "a JSON object")

    check_size(values, kind.max_items)
    return read(values, kind)


def read(values: Mapping[str, Any], kind: type[BodyT]) -> BodyT:
    """The body that a decoded JSON object describes."""
    fields: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name in kind.ignored:
            continue

        if name in kind.sampling_names:
            sampling[name] = value
        elif name in kind.__struct_fields__ and name != "sampling":
            fields[name] = value
        elif name not in kind.refused:
            shown = repr(name[:MAX_NAME_CHARS])
            known = (*kind.sampling_names, *kind.__struct_fields__)
            hint = nearest_name(name[:MAX_NAME_CHARS], known)
            message = f"{shown}: unknown field{hint}, expected a field of the protocol"
            raise RequestError(message, field=name[:MAX_NAME_CHARS], value=value)
        elif not any(value == accepted and type(value) is type(accepted) for accepted in kind.refused[name]):
            allowed = " or ".join([*map(repr, kind.refused[name]), "null"])
            raise RequestError.of(name, value, f"{allowed}: this server supports nothing else")

    return convert({**fields, "sampling": sampling}, kind)


T = TypeVar("T")


def convert(value: object, kind: type[T], place: str = "") -> T:
    """A typed value. RequestError with the path of what is wrong; place: the path of the whole value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        missing = MISSING.fullmatch(what)
        inside = f".{missing[1]}" if missing is not None else ""
        field = f"{place}{path.removesuffix('`')}{inside}".removeprefix(".") or "body"
        if what.startswith("Invalid enum value") and (literals := literals_at(kind, path)):
            allowed = f"one of {', '.join(map(repr, literals))}"
            raise RequestError(
                f"{field}: {what}, expected {allowed}", field=field, allowed=allowed
            ) from error

        raise RequestError(f"{field}: {what}", field=field) from error


def literals_at(kind: object, path: str) -> list[Any]:
    """The values that Literals allow at a path inside a type, such as `.messages[0].role`."""
    found = alternatives([msgspec.inspect.type_info(kind)])
    for name in PATH_PART.findall(path):
        inside: list[msgspec.inspect.Type] = []
        for each in found:
            match each:
                case msgspec.inspect.StructType() if name:
                    inside += [field.type for field in each.fields if field.encode_name == name]
                case msgspec.inspect.ListType() if not name:
                    inside.append(each.item_type)
        found = alternatives(inside)
    return [value for each in found if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]


def alternatives(types: Sequence[msgspec.inspect.Type]) -> list[msgspec.inspect.Type]:
    """The types, with the parts of unions in their place."""
    unions = [each.types if isinstance(each, msgspec.inspect.UnionType) else (each,) for each in types]
    return [each for parts in unions for each in parts]


def check_size(values: object, most: int) -> None:
    """RequestError for more than `most` items over all levels."""
    containers: list[Any] = [values]
    num_items = 0
    while containers:
        container = containers.pop()
        num_items += len(container)
        if num_items > most:
            raise RequestError(f"body: more than {most} items", field="body")

        inside = container.values() if isinstance(container, dict) else container
        containers += [each for each in inside if isinstance(each, dict | list)]


CLIENT_CLOSED_REQUEST = 499
INNERMOST = re.compile(r"(^|\.|\[)[^.\[]*$")
"""The last part of a path such as messages[0].content."""
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnknownModel(DriftError):
    """The request names a model that is not served."""


class Unauthorised(DriftError):
    """The request has none of the keys."""


class Cancelled(DriftError):
    """The request was cancelled by its id."""


class Described(Struct, frozen=True):
    """An error as HTTP tells it.

    status:  of the response.
    kind:    OpenAI's type of the error.
    message: text for people.
    param:   the field of the request that is wrong; None = no field.
    code:    of OpenAI's errors that have one.
    headers: of the response.
    """

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None


def renamed(error: RequestError, names: Mapping[str, str]) -> tuple[str, str]:
    """The field that an error is about, and its message, in the names of the request.

    names: as of `described`. A part of a field that has a name there is in the part of that name."""
    known, message = error.field, str(error)
    while known and known not in names:
        known = INNERMOST.sub("", known)
    if not known:
        return error.field, message

    field = names[known] + error.field[len(known) :]
    return field, field + message.removeprefix(error.field) if message.startswith(error.field) else message


def described(error: Exception, names: Mapping[str, str]) -> Described:
    """names: fields of the engine's errors -> the fields of the request that they are about."""
    message = str(error)
    match error:
        case PromptTooLong():
            param, shown = renamed(error, names)
            if error.field != "prompt":  # one of several, which the message names
                message = shown
            # Some clients know this error by its code, others by these words.
            message = f"prompt is too long: it is longer than the model's context length: {message}"
            code = "context_length_exceeded"
            return Described(400, "invalid_request_error", message, param=param, code=code)
        case RequestError():
            param, message = renamed(error, names)
            return Described(400, "invalid_request_error", message, param=param or None)
        case UnknownModel():
            return Described(404, "invalid_request_error", message, param="model", code="model_not_found")
        case Unauthorised():
            headers = {"WWW-Authenticate": "Bearer"}
            return Described(401, "invalid_request_error", message, code="invalid_api_key", headers=headers)
        case QueueFull():
            return Described(429, "rate_limit_error", message, code="rate_limit_exceeded")
        case EngineClosed():
            return Described(503, "server_error", message)
        case Cancelled():
            return Described(CLIENT_CLOSED_REQUEST, "server_error", message)
        case HTTPException():
            return Described(error.status_code, "invalid_request_error", error.detail, headers=error.headers)
        case DriftError():
            return Described(500, "server_error", message)

    return Described(500, "server_error", "internal error: the server's log has it")


def shaped(found: Described, *, is_anthropic: bool) -> dict[str, Any]:
    """The JSON of an error."""
    if is_anthropic:
        kind = ANTHROPIC_TYPES.get(found.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": found.message}}

    error = {"message": found.message, "type": found.kind, "param": found.param, "code": found.code}
    return {"error": error}


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's protocol sent the request."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


async def error_response(request: Request, error: Exception) -> Response:
    """The response that tells an error in the protocol of the request."""
    found = described(error, getattr(request.state, "error_names", {}))
    body = shaped(found, is_anthropic=is_anthropic(request))
    return JSONResponse(body, found.status, headers=found.headers)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}
