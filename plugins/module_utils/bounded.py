# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A look that may hang (a mount, a driver, a socket) runs in a child that is never waited for beyond its limit."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
RESULT_FD = 3  # the one descriptor that the child keeps, beside 0, 1 and 2 on /dev/null


class TimedOut(Exception):
    """The child did not answer within its limit. It was killed; where it cannot die, it was left behind."""


class ChildFailed(Exception):
    """The function raised, or its process died. `kind` is the exception's class name, `errno` that of an OSError."""

    def __init__(self, message: str, kind: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.errno = errno


def call(function: Callable[..., T], args: Sequence[Any] = (), seconds: float = 10.0) -> T:
    """Return `function(*args)`, run in a child of its own session.

    The child inherits no descriptor (one that held a module's stdout would keep the whole task waiting), and it is
    nobody's child in the end, so that one stuck in the kernel leaves no zombie with us. The result must be picklable.
    Raises TimedOut or ChildFailed.
    """
    deadline = time.monotonic() + seconds
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        _middle(function, args, writer, seconds)
    os.close(writer)
    try:
        os.waitpid(middle, 0)  # ends at once: it only forks
        answer = _read(reader, deadline)
    except TimeoutError:
        _kill_group(middle)
        raise TimedOut(f"{getattr(function, '__name__', 'the look')} did not answer within {seconds:g} s") from None
    except BaseException:  # our own end, by Ctrl-C for one: nothing of ours stays behind
        _kill_group(middle)
        raise
    finally:
        os.close(reader)
    return _value(answer)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _read(reader: int, deadline: float) -> bytes:
    """All that the child writes, to its end. Raises TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(reader, select.POLLIN | select.POLLHUP)
    answer = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(reader, 1 << 20)
        if not chunk:
            return bytes(answer)
        answer += chunk


def _value(answer: bytes) -> Any:
    """What the child answered. Raises ChildFailed with what it raised."""
    try:
        good, value = pickle.loads(answer)
    except (EOFError, ValueError, pickle.UnpicklingError):
        raise ChildFailed("the child died without a result", "Died") from None
    if good:
        return value
    raise ChildFailed(*value)


def _middle(function: Callable[..., Any], args: Sequence[Any], writer: int, seconds: float) -> None:
    """In the first child: open a session, fork the one that works, and end. Never returns."""
    try:
        os.setsid()
        if os.fork() == 0:
            _work(function, args, writer, seconds)
    finally:
        os._exit(0)


def _work(function: Callable[..., Any], args: Sequence[Any], writer: int, seconds: float) -> None:
    """In the second child: let go of everything, call, answer, end. Never returns."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # ends us even where our caller was killed meanwhile
        _keep_only(writer)
        try:
            answer = pickle.dumps((True, function(*args)))
        except Exception as error:
            text = str(error) or type(error).__name__
            answer = pickle.dumps((False, (text, type(error).__name__, getattr(error, "errno", None))))
        while answer:
            answer = answer[os.write(RESULT_FD, answer) :]
    finally:
        os._exit(0)


def _keep_only(writer: int) -> None:
    """Put 0, 1, 2 on /dev/null and the pipe on RESULT_FD; close every other descriptor."""
    pipe = os.dup(writer)
    while pipe <= RESULT_FD:  # out of the way of the numbers that are set next
        pipe = os.dup(pipe)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.dup2(pipe, RESULT_FD, inheritable=False)
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = list(range(os.sysconf("SC_OPEN_MAX")))
    for number in numbers:
        if number > RESULT_FD:
            with suppress(OSError):
                os.close(number)
