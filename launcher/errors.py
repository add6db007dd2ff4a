"""What is wrong with a request, in words for its sender."""


class RequestError(ValueError):
    """A request that can never be served as it is. `param` names the parameter at fault, `code` is OpenAI's."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
