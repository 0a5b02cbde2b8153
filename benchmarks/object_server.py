"""A server of files with the part of the S3 API that loaders use: GET, HEAD, ranges.

    python benchmarks/object_server.py FOLDER [--latency SECONDS]

It prints its address. `s3://bucket/a/b` is FOLDER/a/b; signatures are not checked. Files are sent
by the kernel (`sendfile`), so the server takes little time of the machine that it shares with its
client. Each answer is delayed by the latency, as in a cloud.
"""

import argparse
import asyncio
import re
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote, urlsplit


async def serve(folder, latency):
    async def answer(reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await asyncio.sleep(latency)
                await respond(folder, writer, head)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def respond(folder, writer, head):
    method, target, _ = head.split("\r\n")[0].split(" ", 2)
    name = unquote(urlsplit(target).path).strip("/").partition("/")[2]
    path = folder / name
    if not name or not path.is_file():
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    found = path.stat()
    start, stop, status = 0, found.st_size, "200 OK"
    asked = re.search(r"^range: bytes=(\d+)-(\d*)", head, re.I | re.M)
    if asked:
        start, status = int(asked[1]), "206 Partial Content"
        stop = min(stop, int(asked[2]) + 1) if asked[2] else stop
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {stop - start}",
        f'ETag: "{found.st_mtime_ns:x}-{found.st_size:x}"',
        f"Last-Modified: {formatdate(found.st_mtime, usegmt=True)}",
        "Accept-Ranges: bytes",
        "Content-Type: application/octet-stream",
    ]
    if asked:
        lines.append(f"Content-Range: bytes {start}-{stop - 1}/{found.st_size}")
    writer.write("\r\n".join([*lines, "", ""]).encode())
    await writer.drain()
    if method == "GET" and stop > start:
        with path.open("rb") as stream:
            loop = asyncio.get_running_loop()
            await loop.sendfile(writer.transport, stream, start, stop - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(options.folder, options.latency))
