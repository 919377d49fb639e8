"""A load client: many connections, each of which sends the next request once it has an answer.

    python benchmarks/load.py PORT PATH CLIENTS SECONDS BODIES [PAUSE]

BODIES is a file with one JSON body a line, after a header and a tab if it needs one. Prints one
JSON object: answers by status, with the code of their error, and the latencies of the good ones in
milliseconds. It is a process of its own, so that its CPU time is not the server's. Clients never
back off; with PAUSE each sends a request in so many seconds, and one that is late sends the next
one at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

CRLF = "\r\n"
LONGEST = 90
"""Seconds until an answer must have come."""


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> str:
    """Send one request on an open connection; return the status, with the code of an error."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    body = b""
    if b"transfer-encoding: chunked" in lines:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
    if b"connection: close" in lines:
        writer.close()
    status = head[9:12].decode()
    code = None if status == "200" else re.search(rb'"code": ?"(\w+)"', body)
    return f"{status} {code[1].decode()}" if code else status


async def client(
    port: int, requests: list[bytes], first: int, end: float, pause: float, seen: Counter[str],
    took: list[float],
) -> None:  # fmt: skip
    """Send requests until `end`; a broken connection counts as 'broken' and is opened again."""
    position, writer = first, None
    due = time.perf_counter() + random.uniform(0, pause)
    while time.perf_counter() < end:
        if pause:
            await asyncio.sleep(max(0, due - time.perf_counter()))
            due += pause
        began = time.perf_counter()
        try:
            if writer is None or writer.is_closing():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status = await ask(reader, writer, requests[position % len(requests)])
        except (OSError, asyncio.IncompleteReadError):
            seen["broken"] += 1
            writer = None
            await asyncio.sleep(0.01)
            continue
        seen[status] += 1
        if status == "200":
            took.append((time.perf_counter() - began) * 1000)
        position += 1
    if writer is not None:
        writer.close()


async def run(
    port: int, path: str, clients: int, seconds: float, bodies: list[str], pause: float
) -> None:
    """Run all clients and print the results."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    requests = []
    for line in bodies:
        more, tab, body = line.rpartition("\t")
        lines = f"{len(body.encode())}\r\n{more}{tab and CRLF}\r\n"
        requests.append(f"{head}{lines}{body}".encode())
    seen: Counter[str] = Counter()
    took: list[float] = []
    began = time.perf_counter()
    done, unanswered = await asyncio.wait(
        [
            asyncio.create_task(
                client(port, requests, number * 37, began + seconds, pause, seen, took)
            )
            for number in range(clients)
        ],
        timeout=seconds + LONGEST,
    )
    for task in done:
        task.result()
    if unanswered:
        seen["no answer"] = len(unanswered)
    took.sort()
    middle, late = (took[int(len(took) * share)] if took else 0.0 for share in (0.5, 0.99))
    results = {"statuses": seen, "p50": middle, "p99": late, "seconds": time.perf_counter() - began}
    print(json.dumps(results))


if __name__ == "__main__":
    port, path, clients, seconds, bodies, pause, *_ = [*sys.argv[1:], "0"]
    lines = Path(bodies).read_text().splitlines()
    asyncio.run(run(int(port), path, int(clients), float(seconds), lines, float(pause)))
