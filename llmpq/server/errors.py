"""Errors of the HTTP interface, in OpenAI's and vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from llmpq.errors import CapacityError, LlmpqError, SpecError, StoppedError
from llmpq.server.json_output import json_response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(LlmpqError):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: for the client.
        param: the field that is wrong.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an answer in the form of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the body of an answer in the form of the API of a path."""
    is_anthropic = path.startswith("/v1/messages")
    return anthropic_error(error) if is_anthropic else error.to_json()


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error of a request that can never be served."""
    return ApiError(400, message, param=param)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of pydantic's errors; the values of a request are left out."""
    found = errors[0]
    if found["type"] == "json_invalid":
        return bad_request("The body is not JSON.")
    field = ".".join(str(item) for item in found["loc"] if item != "body") or None
    message = str(found["msg"]).removeprefix("Value error, ")
    return bad_request(f"{field}: {message}" if field else message, field)


def as_api_error(error: BaseException) -> ApiError:
    """Return how an error of the engine is answered; it names nothing of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SpecError):
        return bad_request(str(error))
    if isinstance(error, StoppedError):
        return ApiError(503, "The engine takes no new requests.", retry_after_s=1)
    if isinstance(error, CapacityError):
        return ApiError(503, "The engine has no memory for this request.", retry_after_s=1)
    return ApiError(500, f"The engine failed ({type(error).__name__}).")


def error_response(error: ApiError, path: str) -> Response:
    """Return the answer to a request that failed, in the form of the API of its path."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status in (401, 403, 408, 413, 415):  # the rest of the body stays unread
        headers["Connection"] = "close"
    return json_response(error_body(error, path), error.status, headers)
