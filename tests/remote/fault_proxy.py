"""An HTTP proxy on this machine that injects faults between a client and an S3 server.

    client ──► FaultProxy ──► moto

Whether a request has a fault depends on the seed, the method, the object and on how often this
object was asked for before. So a run can be repeated, although requests come in any order. Faults:

    503     the request does not reach the server; the answer is 503
    429     the same, with Retry-After
    reset   the connection is reset after some bytes of the answer, or before the request arrives
    short   the answer has its whole Content-Length and fewer bytes
    wrong   a byte of an object is another one; other answers have no byte to change
    stall   the second half of the answer does not come
    hang    nothing comes, not even headers

`reset`, `short`, `stall` and `hang` happen after the server has done what the request says (for
`reset`, in half of the cases): a client cannot know whether its write has succeeded.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

KINDS = ("503", "429", "reset", "short", "wrong", "stall", "hang")
_REFUSALS = {
    "503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n",
}


@dataclass
class Request:
    """One request as it was received: the bytes of its head and of its body."""

    method: str
    target: str
    head: bytes
    body: bytes

    @property
    def path(self):
        return urlsplit(self.target).path

    @property
    def names_an_object(self):
        return self.path.strip("/").count("/") > 0


@dataclass
class FaultProxy:
    """The proxy of the server at `port`; it serves from a thread until `stop`."""

    port: int
    rate: float = 0.0
    seed: int = 0
    kinds: tuple = KINDS
    stall_seconds: float = 60.0
    """How long a client waits that waits for ever; then the connection is closed."""
    counts: Counter = field(default_factory=Counter)
    """How many requests came, by method and path."""
    faults: Counter = field(default_factory=Counter)
    """How many faults there were, by kind."""
    on_request: object = None
    """Called with each request before it is answered; it may block, as a slow server does."""
    _locks: dict = field(default_factory=dict)
    _tasks: set = field(default_factory=set)

    def start(self):
        """Serve from another thread; returns the address."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        begun = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(begun, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    def set(self, rate=0.0, seed=0, kinds=KINDS, stall_seconds=60.0, on_request=None):
        """Begin to count again, with other faults."""
        self.rate, self.seed, self.kinds, self.stall_seconds = rate, seed, kinds, stall_seconds
        self.on_request = on_request
        self.counts.clear()
        self.faults.clear()

    def count(self, method, ending=""):
        """How many requests with this method there were for paths that end like this."""
        return sum(n for (m, path), n in self.counts.items() if m == method and ending in path)

    def stop(self):
        async def end():
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader, writer):
        """Answer the requests of one connection."""
        # asyncio itself does not keep a task whose client has closed the connection.
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while (request := await _read_request(reader)) is not None:
                number = self.counts[request.method, request.path]
                self.counts[request.method, request.path] += 1
                if self.on_request is not None:
                    await asyncio.to_thread(self.on_request, request)
                kind, draw = self._fault(request, number)
                if not await self._answer(request, writer, kind, draw):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the proxy stops
        finally:
            writer.transport.abort()

    def _fault(self, request, number):
        """The kind of this request's fault, or None; and a number to choose its details by."""
        text = f"{self.seed} {request.method} {request.target} {number}"
        draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
        if draw % 1_000_003 >= self.rate * 1_000_003:
            return None, draw
        draw //= 1_000_003
        has_bytes = request.method == "GET" and request.names_an_object
        kinds = [kind for kind in self.kinds if kind != "wrong" or has_bytes]
        kind = kinds[draw % len(kinds)] if kinds else None
        self.faults[kind] += 1
        return kind, draw // max(1, len(kinds))

    async def _answer(self, request, writer, kind, draw):
        """Answer one request; returns whether the connection can be used again."""
        if kind in _REFUSALS:
            writer.write(_REFUSALS[kind])
            await writer.drain()
            return True
        if kind == "reset" and draw % 2:
            return False
        # S3 decides about conditional writes one after the other. moto looks, and then writes.
        async with self._locks.setdefault(request.path, asyncio.Lock()):
            head, body = await self._forward(request)
        if kind == "wrong" and body:
            place = draw % len(body)
            body = body[:place] + bytes([body[place] ^ (1 + draw % 255)]) + body[place + 1 :]
        answer = head + body
        if kind in ("reset", "short", "stall"):
            # A head that ends early may have no Content-Length, and then no client can notice it.
            least = len(head) if kind == "short" and body else 0
            writer.write(answer[: least + draw // 2 % max(1, len(answer) - least)])
            await writer.drain()
        if kind in ("stall", "hang"):
            await asyncio.sleep(self.stall_seconds)
        if kind == "short":  # closed in order, not reset
            writer.close()
        if kind in ("reset", "short", "stall", "hang"):
            return False
        writer.write(answer)
        await writer.drain()
        return True

    async def _forward(self, request):
        """The server's answer: the head, with the length of the body, and the body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
            sized = [line for line in lines if line.lower().startswith(b"content-length:")]
            body = b""
            if request.method != "HEAD":
                body = await reader.readexactly(int(sized[0].split(b":")[1])) if sized else b""
                body = body if sized else await reader.read()
                sized = [b"Content-Length: %d" % len(body)]
        finally:
            writer.close()
        dropped = (b"content-length:", b"connection:", b"transfer-encoding:")
        kept = [line for line in lines[1:] if not line.lower().startswith(dropped)]
        status = lines[0].replace(b"HTTP/1.0", b"HTTP/1.1")
        return b"\r\n".join([status, *kept, *sized]) + b"\r\n\r\n", body


async def _read_request(reader):
    """The next request of a connection; None if the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    method, target, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
    return Request(method, target, head, await reader.readexactly(length))
