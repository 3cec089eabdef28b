"""Refusals of the API server: a `Status` object, as every client expects."""

from __future__ import annotations

from tests.kubernetes.api.kinds import Object


class ApiError(Exception):
    """A refusal with its HTTP code and Kubernetes' word for the reason."""

    def __init__(self, code: int, reason: str, message: str, causes: list[Object] | None = None):
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes or []

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": {"causes": self.causes},
            "code": self.code,
        }


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource} "{name}" not found')


def already_exists(resource: str, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists')


def conflict(message: str, causes: list[Object] | None = None) -> ApiError:
    return ApiError(409, "Conflict", message, causes)


def invalid(message: str) -> ApiError:
    return ApiError(422, "Invalid", message)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)
