"""What clients are told when something is wrong, in the form of the endpoint that they asked."""

from __future__ import annotations

import orjson
from aiohttp import web

from dualpath_sglang.router.options import Role
from dualpath_sglang.router.requests import Kind

RETRY_AFTER_S = 1


def error_response(
    kind: Kind | None, status: int, message: str, param: str | None = None
) -> web.Response:
    """OpenAI's form under ``/v1``; SGLang's, which has less, elsewhere."""
    error: dict[str, object] = {"message": message, "code": status}
    if kind in ("chat", "completions"):
        error |= {"type": _type(status), "param": param}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return web.json_response(body_of(error), status=status, headers=headers)


def body_of(error: dict[str, object]) -> dict[str, object]:
    """As all errors are."""
    return {"error": error}


def _type(status: int) -> str:
    if status == 503:
        return "service_unavailable"
    return "invalid_request_error" if 400 <= status < 500 else "server_error"


def error_event(role: Role, message: str) -> bytes:
    """The end of a stream that breaks off, named ``part`` is whose fault it is."""
    error = {
        "message": f"The answer breaks off: {message}",
        "type": "server_error",
        "param": None,
        "code": 502,
        "part": role,
    }
    return b"\n\ndata: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"
