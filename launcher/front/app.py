"""The HTTP front: OpenAI's completions, chat and models; the operator's part is in `admin`."""

import logging
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.front.admin import Admin
from launcher.front.answers import EventStream, WholeAnswer
from launcher.front.auth import RequireKey
from launcher.front.body import read_json
from launcher.front.chaos import ChaosDesk
from launcher.front.errors import SERVICE_ERRORS, ApiError, on_disconnect, on_http_error, on_service_error, to_api_error
from launcher.front.logprobs import Spell
from launcher.front.replies import ChatRenderer, CompletionRenderer, Renderer
from launcher.front.schemas import ChatRequest, CompletionRequest, parse_chat, parse_completion
from launcher.service import Params, Service

log = logging.getLogger(__name__)


class Front:
    """The endpoints of OpenAI's API for one service."""

    def __init__(self, service: Service, max_body_bytes: int) -> None:
        self._service = service
        self._max_body = max_body_bytes
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        body = parse_completion(await read_json(request, self._max_body))
        self._check_model(body.model)
        params = body.params()
        await self._service.check(params, body.grammar_param)
        prompts = [
            self._service.prompt_from_text(prompt) if isinstance(prompt, str) else self._service.prompt_from_ids(prompt)
            for prompt in body.prompt
        ]
        renderer = CompletionRenderer(body.model, body.n or 1, body.include_usage, self._spell(params))
        return self._answer(body, params, prompts, renderer)

    async def chat(self, request: Request) -> Response:
        body = parse_chat(await read_json(request, self._max_body))
        self._check_model(body.model)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        params = body.params()
        await self._service.check(params, body.grammar_param)
        prompt = self._service.prompt_from_chat(messages)
        renderer = ChatRenderer(body.model, body.n or 1, body.include_usage, self._spell(params))
        return self._answer(body, params, [prompt], renderer)

    def _spell(self, params: Params) -> Spell | None:
        return None if params.logprobs is None else self._service.text.token_bytes

    def _answer(
        self, body: CompletionRequest | ChatRequest, params: Params, prompts: list[list[int]], renderer: Renderer
    ) -> WholeAnswer | EventStream:
        job = self._service.start(prompts, params, renderer.n)
        return EventStream(job, renderer) if body.stream else WholeAnswer(job, renderer)

    def _check_model(self, name: str) -> None:
        if name != self._service.model_name:
            message = f"the model `{name}` does not exist here; this server has `{self._service.model_name}`"
            raise ApiError(404, message, "model", "model_not_found")

    def _model(self) -> dict[str, object]:
        name = self._service.model_name
        card: dict[str, object] = {"id": name, "object": "model", "created": self._created, "owned_by": "phalanx"}
        return card | ({"max_model_len": self._service.max_len} if self._service.router.hellos else {})

    async def models(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())


async def on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return to_api_error(error).response()


def make_app(service: Service, max_body_bytes: int, *, api_key: str | None = None, chaos: bool = False) -> Starlette:
    """The ASGI application of a service. Bodies above `max_body_bytes` are refused, who lacks the key, if there is one,
    and faults without `chaos`."""
    front, admin = Front(service, max_body_bytes), Admin(service.router)
    app = Starlette(
        routes=[
            Route("/v1/completions", front.completions, methods=["POST"]),
            Route("/v1/chat/completions", front.chat, methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/v1/models/{name:path}", front.model),
            *admin.routes,
            ChaosDesk(service.router, chaos).route,
        ],
        middleware=[Middleware(RequireKey, key=api_key)] if api_key is not None else [],
        exception_handlers={
            **dict.fromkeys(SERVICE_ERRORS, on_service_error),
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app
