# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One request to the server and its dump. An HTTP 200 means accepted; only the dump, or its error, is an answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp

PREFIX = "relight-"
SCAN_SECONDS = 0.05
SWEEP_SECONDS = 5.0
ANSWER_SECONDS = 5.0  # a dump that is there first waits this long for its HTTP answer, so that the connection is kept
_RID = re.compile(r"relight-[0-9a-f]{8}-[0-9]+-(?P<pid>[0-9]+)\.(?P<start>[0-9]+)\.[0-9]+(\.error)?")


class Away(Exception):
    """The server is not there or broke off. `accepted`: it had taken the request, which may have been what killed it."""

    def __init__(self, message: str, accepted: bool) -> None:
        super().__init__(message)
        self.accepted = accepted


class Refused(Exception):
    """The server is there and gave no dump for this request; the message says why."""


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Names:
    """Request ids of this process. They tell which process made them, so that those of a dead one can be swept."""

    def __init__(self) -> None:
        self.life = f"{os.getpid()}.{start_time(os.getpid())}"
        self.count = 0

    def rid(self, instance: str, index: int) -> str:
        self.count += 1
        return f"{PREFIX}{instance[:8]}-{index}-{self.life}.{self.count}"


def is_dead(name: str) -> bool:
    """Was this file asked for by a client that is gone?"""
    match = _RID.fullmatch(name)
    return match is not None and start_time(int(match["pid"])) != int(match["start"])


def sweep(dump_dir: str) -> list[str]:
    """Remove the dumps that dead clients asked for. Raises OSError where the directory cannot be read."""
    swept = []
    with os.scandir(dump_dir) as entries:
        for entry in entries:
            if is_dead(entry.name):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    swept.append(entry.name)
    return swept


class DumpWatch:
    """Waits for names in the dump directory. It looks only while somebody waits."""

    def __init__(self, dump_dir: str) -> None:
        self.dump_dir = dump_dir
        self.waiting: dict[str, asyncio.Future[str]] = {}
        self.forgotten: set[str] = set()
        self._wanted = asyncio.Event()
        self._swept = 0.0

    def expect(self, rid: str) -> asyncio.Future[str]:
        """A future of the path of `<rid>` or `<rid>.error`."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting[rid] = future
        self._wanted.set()
        return future

    def forget(self, rid: str) -> None:
        """Nobody waits for it any more: what is there, or comes later, is removed."""
        self.waiting.pop(rid, None)
        for name in (rid, f"{rid}.error"):
            try:
                os.unlink(os.path.join(self.dump_dir, name))
                return
            except OSError:
                continue
        self.forgotten.add(rid)

    def settle(self, rid: str) -> None:
        """Its dump was taken: remove it. Nothing more will come."""
        self.forget(rid)
        self.forgotten.discard(rid)

    def look(self) -> None:
        """One look at the directory. Raises OSError."""
        with os.scandir(self.dump_dir) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(PREFIX)]
        for name in names:
            rid = name[: -len(".error")] if name.endswith(".error") else name
            future = self.waiting.get(rid)
            if future is not None:
                if not future.done():
                    future.set_result(os.path.join(self.dump_dir, name))
            elif rid in self.forgotten:
                self.settle(rid)
        now = time.monotonic()
        if now - self._swept > SWEEP_SECONDS:
            self._swept = now
            sweep(self.dump_dir)

    async def run(self) -> None:
        """Look again and again until cancelled. Raises OSError."""
        while True:
            await self._wanted.wait()
            if not self.waiting:
                self._wanted.clear()
                continue
            self.look()
            await asyncio.sleep(SCAN_SECONDS)


class Fetcher:
    """Sends ids and gives back where their dump lies."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: str,
        watch: DumpWatch,
        request_seconds: float,
        dump_seconds: float,
        max_new_tokens: int = 0,
    ) -> None:
        self.session = session
        self.server = server.rstrip("/")
        self.watch = watch
        self.request_seconds = request_seconds
        self.dump_seconds = dump_seconds
        self.max_new_tokens = max_new_tokens
        self.last_arrival = 0.0

    async def fetch(self, rid: str, ids: Sequence[int]) -> str:
        """The path of the dump for `ids`. The caller settles or forgets the rid. Raises Away, Refused."""
        arrived = self.watch.expect(rid)
        post = asyncio.create_task(self._post(rid, ids))
        try:
            await self._first(post, arrived)
            if not arrived.done():
                await self._after_answer(post, arrived)
            else:
                await asyncio.wait({post}, timeout=ANSWER_SECONDS)
        finally:
            post.cancel()
            with suppress(BaseException):
                await post
        self.last_arrival = time.monotonic()
        return _whole(arrived.result())

    async def _first(self, post: asyncio.Task[None], arrived: asyncio.Future[str]) -> None:
        """Until one of the two is there. Where others get their dumps meanwhile, this one may wait its turn, up to four times as long."""
        begin = time.monotonic()
        while not post.done() and not arrived.done():
            now = time.monotonic()
            left = min(max(begin, self.last_arrival) + self.request_seconds, begin + 4 * self.request_seconds) - now
            if left <= 0:
                raise Refused(f"no answer and no dump within {now - begin:.0f} s")
            both: set[asyncio.Future[Any]] = {post, arrived}
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _after_answer(self, post: asyncio.Task[None], arrived: asyncio.Future[str]) -> None:
        """The server has answered, or broken off; the dump is there now or comes soon."""
        self.watch.look()
        error = post.exception()
        if arrived.done():
            return
        if error is not None:
            raise error
        await asyncio.wait({arrived}, timeout=self.dump_seconds)
        if not arrived.done():
            raise Refused(f"the server answered, but no dump came within {self.dump_seconds:g} s: is the dump plugin active in it?")

    async def _post(self, rid: str, ids: Sequence[int]) -> None:
        body = {"rid": rid, "input_ids": list(ids), "sampling_params": {"max_new_tokens": self.max_new_tokens, "temperature": 0}}
        try:
            async with self.session.post(f"{self.server}/generate", json=body) as response:
                text = (await response.read())[:2000].decode(errors="replace")
                status = response.status
        except aiohttp.ClientConnectorError as error:
            raise Away(f"nobody answers at {self.server} ({error.os_error.strerror or error})", accepted=False) from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise Away(f"{self.server} broke off ({error or type(error).__name__})", accepted=True) from error
        if status == 503:
            raise Away(f"{self.server} is not ready (HTTP 503)", accepted=False)
        if status != 200:
            raise Refused(f"HTTP {status}: {_message(text)}")

    async def abort(self, rid: str) -> None:
        """Tell the server that nobody waits for this request any more. A courtesy: whatever goes wrong is nobody's business."""
        with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            timeout = aiohttp.ClientTimeout(total=2)
            async with self.session.post(f"{self.server}/abort_request", json={"rid": rid}, timeout=timeout) as response:
                await response.read()


def session() -> aiohttp.ClientSession:
    """A session whose requests have no limit of their own but that of connecting; deadlines are the fetcher's."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=False)


def _whole(path: str) -> str:
    """The path itself, if it is a dump. Raises Refused with the server's sentence if it is an error."""
    if not path.endswith(".error"):
        return path
    try:
        with open(path, encoding="utf-8") as handle:
            why = str(json.load(handle)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        why = "it did not say why"
    raise Refused(f"the server could not dump it: {why}")


def _message(text: str) -> str:
    """The sentence in an error body of SGLang, else its beginning."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return (text.strip().splitlines() or ["no word of explanation"])[0][:300]
