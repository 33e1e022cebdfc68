"""``concurrent.futures`` as the simulated processes see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from scheduler import Killed
from threads import Event, Thread


class Future:
    """``concurrent.futures.Future``."""

    def __init__(self) -> None:
        self._done = Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def cancel(self) -> bool:
        return False

    def wait(self, timeout: float) -> None:
        self._done.wait(timeout)

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done.wait(timeout):
            raise TimeoutError
        return self._error

    def set_result(self, value: Any) -> None:
        self._value = value
        self._done.set()

    def set_exception(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()


class ThreadPoolExecutor:
    """``concurrent.futures.ThreadPoolExecutor``: threads that end when there is no work."""

    def __init__(
        self, max_workers: int | None = None, thread_name_prefix: str = "", *_: Any
    ) -> None:
        self._most = max_workers or 4
        self._name = thread_name_prefix or "pool"
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running: list[Thread] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()
        self._queue.append((future, lambda: work(*args, **kwargs)))
        self._running = [thread for thread in self._running if thread.is_alive()]
        if len(self._running) < self._most:
            thread = Thread(target=self._work, name=self._name)
            self._running.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while self._queue:
            future, work = self._queue.popleft()
            try:
                value = work()
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - as the real one
                future.set_exception(error)
            else:
                future.set_result(value)

    def map(self, work: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(work, *args) for args in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._queue.clear()
        if wait:
            for thread in self._running:
                thread.join()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def futures_module() -> ModuleType:
    """Return the module that stands for ``concurrent.futures``."""
    module = ModuleType("concurrent.futures")
    vars(module).update(
        Future=Future,
        ThreadPoolExecutor=ThreadPoolExecutor,
        TimeoutError=TimeoutError,
    )
    return module
