"""Honest clients while an attacker sends the worst request of each route, opens connections and reads no answers."""

import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

LONG = "the river " * 3000
WORST = [  # of each route, within its limits
    ("/score", {"prefix": "The", "candidates": [LONG, *(f"text number {i}" for i in range(2000))]}),
    ("/score", {"prefix": "The " * 200, "candidates": [f" and then {i}" for i in range(4000)]}),
    ("/v1/completions", {"model": "load", "prompt": "The", "candidates": 4096, "max_tokens": 400, "n": 4}),
    ("/v1/completions", {"model": "load", "prompt": ["The"] * 64, "candidates": 4096}),
    ("/v1/completions", {"model": "load-base", "prompt": "The " * 500, "max_tokens": 0, "echo": True, "logprobs": 100}),
    ("/v1/completions", {"model": "load", "prompt": "The", "sampler": "metropolis", "settings": {"steps": 4000}}),
    ("/playground/next", {"prefix": "The", "top_k": 10, "completions": 256}),
    ("/playground/rising", {"prefix": "The", "text": "a b " * 100}),
    ("/playground/write", {"prefix": "The", "candidates": 4096, "length": 400}),
]
SMALL = {"model": "load", "prompt": "The", "candidates": 16, "seed": 3}


@contextmanager
def command(folder):
    """``freenergy serve`` as a process of its own: the process and its address."""
    call = [sys.executable, "-c", "from freenergy.cli import main; main()", "serve", str(folder), "--port", "0"]
    own = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*call, "--name", "load", "--timeout", "30"], env=own, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        said = process.stderr.readline()
        address = re.search(r"http://\S+", said)
        assert address, said + process.stderr.read()
        yield process, address[0]
    finally:
        process.kill()
        process.communicate()


async def honest(address, clients, seconds):
    """Latencies and statuses of clients that ask one small question after the other, and those of /health."""
    latencies, statuses, health = [], [], []
    until = time.monotonic() + seconds

    async def one():
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            while time.monotonic() < until:
                start = time.monotonic()
                answer = await client.post("/v1/completions", json=SMALL)
                latencies.append(time.monotonic() - start)
                statuses.append(answer.status_code)

    async def watch():
        while time.monotonic() < until:
            async with httpx.AsyncClient(base_url=address, timeout=10) as client:
                health.append((await client.get("/health")).status_code)
            await asyncio.sleep(0.2)

    await asyncio.gather(watch(), *(one() for _ in range(clients)))
    return latencies, statuses, health


def connect(address, data, buffer=None):
    host, port = address.removeprefix("http://").split(":")
    found = socket.socket()
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.connect((host, int(port)))
    found.sendall(data)
    return found


def request(path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def attacker(address, half_open, never_read):
    """One worst request after the other, next to connections that send nothing or read nothing."""
    is_over, statuses = threading.Event(), []

    def work():
        with httpx.Client(base_url=address, timeout=60) as client:
            while not is_over.is_set():
                for path, body in WORST:
                    if is_over.is_set():
                        return
                    try:
                        statuses.append(client.post(path, json=body, timeout=4).status_code)
                    except httpx.TimeoutException:
                        statuses.append(None)  # it left

    with ExitStack() as stack:
        for _ in range(half_open):
            stack.enter_context(connect(address, b"GET /health HTTP/1.1\r\nHos"))
        echo = {"model": "load-base", "prompt": "The " * 100, "max_tokens": 0, "echo": True, "logprobs": 50}
        for _ in range(never_read):
            stack.enter_context(connect(address, request("/v1/completions", echo), buffer=4096))
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield statuses
        finally:
            is_over.set()
            thread.join()


def storm(folder, clients, seconds, half_open, never_read):
    with command(folder) as (process, address):
        memory = psutil.Process(process.pid).memory_info
        asyncio.run(honest(address, clients, seconds / 2))  # warm
        calm, first, _ = asyncio.run(honest(address, clients, seconds))
        before = memory().rss
        with attacker(address, half_open, never_read) as attacks:
            stormy, second, health = asyncio.run(honest(address, clients, seconds))
        after = memory().rss
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        said = process.stderr.read()
    assert set(first) == {200}
    assert set(second) <= {200, 429}
    assert health
    assert set(health) == {200}, "/health answers throughout"
    assert all(status is None or status < 500 for status in attacks), attacks
    assert after - before < 400e6, f"memory grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB"
    assert "Traceback" not in said
    ratio = statistics.median(stormy) / statistics.median(calm)
    print(f"median {statistics.median(calm):.3f} s alone, {statistics.median(stormy):.3f} s under attack: {ratio:.2f}×")
    return ratio


def test_a_small_storm(joint_run):
    """Few clients for a few seconds: statuses, memory, /health and a clean end; times are for the long form."""
    storm(joint_run[0], clients=8, seconds=3, half_open=60, never_read=10)


@pytest.mark.faults
def test_honest_clients_keep_their_latency(joint_run):
    assert storm(joint_run[0], clients=64, seconds=20, half_open=300, never_read=100) < 1.5
