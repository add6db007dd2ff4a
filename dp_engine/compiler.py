"""Requests whose grammar is being compiled: in a thread of its own, while the step loop goes on."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

from dp_engine.grammar import GrammarError, Matcher, Vocabulary
from dp_engine.messages import Add

Outcome = Matcher | GrammarError


class GrammarCompiler:
    """Holds requests from `submit` until `finished` returns them, in order. Owned by the step loop's thread.

    `load` makes the vocabulary, with the first request; it may raise GrammarError, which then is every request's.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._held: set[int] = set()  # request ids
        self._todo: SimpleQueue[Add] = SimpleQueue()
        self._done: SimpleQueue[tuple[Add, Outcome | Exception]] = SimpleQueue()
        self._thread: Thread | None = None

    @property
    def pending(self) -> bool:
        """Whether requests are held. The gang must not fall asleep over them."""
        return bool(self._held)

    def submit(self, request: Add) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._held.add(request.request_id)
        self._todo.put(request)

    def cancel(self, request_id: int) -> bool:
        """Forget a request; False if it is not held."""
        held = request_id in self._held
        self._held.discard(request_id)
        return held

    def finished(self) -> list[tuple[Add, Outcome]]:
        """Requests that are held no more. Raises what the thread has raised unexpectedly."""
        found: list[tuple[Add, Outcome]] = []
        while self._held:
            try:
                request, outcome = self._done.get_nowait()
            except Empty:
                break
            if not isinstance(outcome, Outcome):
                raise outcome
            if self.cancel(request.request_id):
                found.append((request, outcome))
        return found

    def _run(self) -> None:
        vocabulary: Vocabulary | GrammarError | None = None
        while True:
            request = self._todo.get()
            try:
                if vocabulary is None:
                    vocabulary = self._load()
                self._done.put((request, _matcher(vocabulary, request)))
            except GrammarError as error:
                vocabulary = vocabulary or error
                self._done.put((request, error))
            except Exception as error:
                self._done.put((request, error))


def _matcher(vocabulary: Vocabulary | GrammarError, request: Add) -> Matcher:
    """Raises GrammarError."""
    if isinstance(vocabulary, GrammarError):
        raise vocabulary
    grammar = request.sampling.grammar
    assert grammar is not None
    emitted = request.prompt[len(request.prompt) - request.num_emitted :]
    return vocabulary.matcher(grammar, emitted)
