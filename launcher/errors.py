"""Errors of the launcher that are told to somebody: to the sender of a request, or to who started the deployment."""


class RequestError(ValueError):
    """A request that can never be served as it is. `param` names the parameter at fault, `code` is OpenAI's."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class DeploymentFailed(RuntimeError):
    """The ranks did not come up, or ended unasked; the message names the rank and says why."""
