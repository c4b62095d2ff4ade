"""Errors as the protocols' own error objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import DriftError, EngineClosed, PromptTooLong, QueueFull, RequestError

__all__ = ["Cancelled", "Unauthorised", "UnknownModel", "described", "error_response", "shaped"]

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
            # Some clients know this error by its code, others by these words.
            message = f"prompt is too long: it is longer than the model's context length: {message}"
            param, code = renamed(error, names)[0], "context_length_exceeded"
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
